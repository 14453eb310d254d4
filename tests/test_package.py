"""The package as pip gets it: what is in the wheel and in the source distribution."""

import json
import runpy
import shutil
import tarfile
import zipfile

import pytest
from programs import ROOT, python

import hf_descent


@pytest.mark.slow
def test_wheel_and_source_distribution(tmp_path):
    pytest.importorskip("build")
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "hf_descent", source / "hf_descent", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("README.md", "LICENSE", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    python("-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source)

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    files = [
        path for path in (ROOT / "hf_descent").rglob("*") if path.suffix in {".py", ".yaml", ".md"}
    ]
    assert {str(path.relative_to(ROOT)) for path in files} <= names
    assert "hf_descent/py.typed" in names  # else type checkers read no annotations
    assert f"Version: {hf_descent.__version__}\n" in text
    assert "Provides-Extra: commands\n" in text and "Requires-Python: >=3.10\n" in text

    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        assert any(name.endswith("hf_descent/py.typed") for name in opened.getnames())


def test_the_table_of_versions_is_that_of_the_results():
    script = runpy.run_path(str(ROOT / ".ci" / "versions"))
    results = json.loads(script["RESULTS"].read_text())
    assert script["page"](results) == script["PAGE"].read_text()
    oldest = results["oldest"]["releases"]
    for name, release in script["floors"]().items():
        assert oldest[name].startswith(release), f"{name}: run .ci/versions"
