"""Packages that only a part of this one needs, and the extras that install them."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


# By the module that is missing, the extra that installs it.
EXTRAS = {
    **dict.fromkeys(("datasets", "evaluate", "matplotlib", "scipy", "sklearn"), "commands"),
    "trl": "sft",
    "peft": "peft",
    "optuna": "tune",
    "av": "video",
    "dp_accounting": "privacy",
    "gradio": "show",
    "onnx": "onnx",
    "onnxscript": "onnx",
}
INSTALL = "`pip install 'hf_descent[{0}]'`, or '.[{0}]' in a clone"


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_dataset(data: Any) -> bool:
    """Whether `data` is a `datasets.Dataset`. Where nobody imported that package, nothing is."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(data, datasets.Dataset)


@contextmanager
def extra_needed(what: str) -> Iterator[None]:
    """Imports for `what`; ImportError names the extra that installs a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = EXTRAS[error.name]
        raise ImportError(
            f"{what} needs {error.name}: {INSTALL.format(extra)}", name=error.name
        ) from error
