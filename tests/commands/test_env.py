"""`hf-descent env`: what a bug report needs."""

import platform

import torch
import transformers

from hf_descent import __version__, cli


def test_it_prints_versions_and_devices(capsys):
    cli.main(["env"])
    printed = capsys.readouterr().out.splitlines()
    assert f"- hf_descent: {__version__}" in printed
    assert f"- transformers: {transformers.__version__}" in printed
    assert f"- Python: {platform.python_version()}" in printed
    if not torch.cuda.is_available():
        assert "- devices: CPU" in printed


def test_what_is_missing_is_said(capsys, monkeypatch):
    monkeypatch.setattr("hf_descent.commands.env.PACKAGES", ("torch", "no-such-package"))
    cli.main(["env"])
    assert "- no-such-package: not installed" in capsys.readouterr().out
