"""Files that are written whole or not at all; what reads them is tested where it is used."""

import json
import subprocess
import sys

import pytest

from hf_descent.files import atomic_write, read_json


@pytest.mark.parametrize(
    ("mode", "old", "new"), [("w", "alt", "größer\n"), ("wb", b"old", b"\xff\x00")]
)
def test_a_file_is_replaced_when_it_is_whole(tmp_path, mode, old, new):
    path = tmp_path / "card.json"
    for content in (old, new):
        with atomic_write(path, mode) as file:
            file.write(content)
    assert path.read_bytes() == (new if mode == "wb" else new.encode())
    with pytest.raises(TypeError), atomic_write(path) as file:
        json.dump({"written": 1, "then": object()}, file)
    assert path.read_bytes() == (new if mode == "wb" else new.encode())


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "card.json"
    path.write_text("{}")
    code = """if True:
        import os, signal, sys
        from hf_descent.files import atomic_write
        with atomic_write(sys.argv[1]) as file:
            file.write('{"half": ')
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -9
    assert read_json(path) == {}
