"""Where and with what a result was made."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_descent.files


ROOT = Path(__file__).parent.parent.parent
fingerprint = cache(hf_descent.files.fingerprint)  # every command asks for those of its files


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


def fingerprints(data: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each data set (or model) given by paths the [`fingerprint`] of each."""
    return {name: [fingerprint(part) for words in paths for part in words.split(",")] for name, paths in data.items()}
