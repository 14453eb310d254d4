"""`hf-descent env`: the versions and devices to put into a bug report."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch


PACKAGES = (
    "hf_descent", "torch", "transformers", "accelerate", "trl", "peft", "datasets", "safetensors",
    "numpy", "deepspeed", "optuna",
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Print one fact a line."""
    for name, value in facts().items():
        print(f"- {name}: {value}")


def facts() -> dict[str, str]:
    """What is installed, and what it runs on."""
    return {
        **{package: _release(package) for package in PACKAGES},
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(_devices()),
        "distributed": "available" if torch.distributed.is_available() else "not available",
    }


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_name(number) for number in range(count)]
    if torch.backends.mps.is_available():
        return ["MPS"]
    return ["CPU"]
