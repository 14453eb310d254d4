"""The file of a checkpoint that holds the dual side."""

import json
import os
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..files import atomic_write
from .problem import DescentProblem


STATE_NAME = "descent_state.safetensors"


def write_state(folder: str, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Write tensors and plain values into a checkpoint folder by an atomic write."""
    with atomic_write(os.path.join(folder, STATE_NAME), "wb") as file:
        file.write(save(tensors, metadata={"state": json.dumps(settings)}))


def read_state(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and settings of the file in a checkpoint folder; ValueError names the file if it is unreadable."""
    path = os.path.join(folder, STATE_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            saved = json.loads(file.metadata()["state"])

        settings = {name: saved[name] for name in ("active_from", "problem", "schedule")}
        upgrade_0_1(tensors, settings)
        if settings["problem"] is not None:
            DescentProblem(**settings["problem"])
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({error}); resume from another checkpoint."
        ) from error
    return tensors, settings


def upgrade_0_1(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Add, in place, what version 0.1 did not save."""
    no_losses = torch.zeros_like(tensors["averages"])  # [layers]
    tensors.setdefault("square", torch.zeros(1))
    tensors.setdefault("warmup_losses", no_losses)
    tensors.setdefault("closing_losses", no_losses[None][:0])  # [0, layers]

    problem = settings["problem"]
    if problem is not None and settings["schedule"]["initial_loss_bound"] == "auto":
        # It measured f_0, in the warm-up, but not the loss of a constant prediction.
        problem.setdefault("chance_loss", problem["initial_loss_bound"])
