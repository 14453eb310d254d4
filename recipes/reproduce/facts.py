"""Where and with what a result was made."""

import glob
import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers


ROOT = Path(__file__).parent.parent.parent
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
PROCESSOR_FILES = ("*token*", "vocab.*", "merges.txt", "*.model", "*processor_config.json", "chat_template*")
BEGINNING = 2**14  # bytes: past the header of a video, whose frames are too many to be read whole


def facts() -> dict[str, Any]:
    """Commit, date, versions and machine."""
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": machine(),
    }


def commit() -> str:
    """The commit of this checkout, with a plus where tracked files of the package or the recipes differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno", "--", "hf_descent", "recipes") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def machine() -> str:
    processor = platform.processor() or platform.machine()
    if os.path.isfile("/proc/cpuinfo"):
        names = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        processor = names[0].strip() if names else processor
    words = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        words += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return words


@cache  # every command asks for those of its files
def fingerprint(path: str) -> str:
    """The last part of a path, with the beginning of a SHA-256.

    That is of the whole file; of a model in a folder, of its config and weights, and another one of its tokenizer or
    image processor; of any other folder, and of what a pattern finds, of the files' names, sizes and beginnings. Of
    what is not on this machine, as a name on the Hub, it is nothing more than the name.
    """
    found = Path(path)
    if found.is_file():
        return f"{found.name} ({digest([found])})"
    model, processor = (
        [file for pattern in patterns for file in sorted(found.glob(pattern)) if file.is_file()]
        for patterns in (MODEL_FILES, PROCESSOR_FILES)
    )
    if model:
        return f"{found.name} ({digest(model)})" + (f", tokenizer ({digest(processor)})" if processor else "")
    beginnings = hashlib.sha256()
    roots = [found] if found.exists() else [Path(match) for match in sorted(glob.glob(path))]
    for root in roots:
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if file.is_file() and not file.name.startswith("."):
                beginnings.update(f"{file.relative_to(root.parent)} {file.stat().st_size} ".encode())
                with file.open("rb") as opened:
                    beginnings.update(opened.read(BEGINNING))
    if roots:
        return f"{found.name} ({beginnings.hexdigest()[:12]})"
    return found.name if found.parent.exists() else path


def digest(files: Iterable[Path]) -> str:
    """The beginning of the SHA-256 of a file, or of those of several."""
    digests = []
    for each in files:
        with each.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return (digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest())[:12]


def fingerprints(data: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each data set (or model) given by paths the [`fingerprint`] of each."""
    return {name: [fingerprint(part) for words in paths for part in words.split(",")] for name, paths in data.items()}
