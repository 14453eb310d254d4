"""What depends on the releases of other libraries: the private names, and what `compat.py` does on old ones."""

import ast
import importlib
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_descent import compat


PACKAGE = Path(compat.__file__).parent
# Private by their form, but documented, or of the standard library.
OTHERS = {"_replace", "_actions", "_group_actions", "_optionals"}


def sources():
    return {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "compat.py"}


def listed():
    return {name for names in compat.PRIVATE_NAMES.values() for name in names} | set(
        compat.OVERRIDDEN
    )


@pytest.mark.parametrize("module", compat.PRIVATE_NAMES)
def test_private_names_are_still_there(module):
    pytest.importorskip(module.split(".")[0])
    owner = importlib.import_module(module)
    text = Path(owner.__file__).read_text()
    for name in compat.PRIVATE_NAMES[module]:
        is_attribute = re.search(rf"\b{name}\b", text) or hasattr(torch.Tensor, name)
        assert name in module.split(".") or is_attribute, f"{module} has no {name} any more"


def test_overridden_methods_are_still_there():
    sft = pytest.importorskip("trl").SFTTrainer
    for name in compat.OVERRIDDEN:
        assert callable(getattr(sft, name, None)), f"Trainer has no {name} any more"


def own_names(tree):
    """What a module itself defines or stores."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def private_names(tree):
    """The attributes and the parts of imports with one underscore in front."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update(node.module.split("."), (alias.name for alias in node.names))
    return {name for name in names if re.match("_[^_]", name)}


def test_all_private_names_are_listed():
    trees = {path: ast.parse(text) for path, text in sources().items()}
    known = listed() | OTHERS
    for tree in trees.values():
        known |= own_names(tree)
    for path, tree in trees.items():
        unlisted = private_names(tree) - known
        assert not unlisted, f"{path}: give them a reason in compat.py"


def test_overridden_methods_are_listed():
    sft = pytest.importorskip("trl").SFTTrainer
    for path in (PACKAGE / "trainer.py", PACKAGE / "sft_trainer.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_private = isinstance(node, ast.FunctionDef) and re.match("_[a-z]", node.name)
            if is_private and hasattr(sft, node.name):
                assert node.name in compat.OVERRIDDEN, f"give {node.name} a reason in compat.py"


def test_few_private_methods_are_overridden():
    assert len(compat.OVERRIDDEN) <= 6


def test_listed_names_are_used():
    text = "\n".join(sources().values())
    unused = {name for name in listed() if not re.search(rf"\b{name}\b", text)}
    used_there = {compat.CHECKPOINT_FUNCTION, compat.CAPTURE_MARK, "_forward_hooks"}
    assert unused <= used_there, "take them out of compat.py"


def test_nothing_else_asks_for_a_version():
    for path, text in sources().items():
        assert not re.search(r"packaging|importlib\.metadata|\.__version__ *[<>=]", text), path


class OldTrainer:
    """The rule by which Trainer divided a loss before it had `loss_is_scaled_for_ga`."""

    current_gradient_accumulation_steps = 4

    def __init__(self, accepts, loss_fn):
        self.model_accepts_loss_kwargs = accepts
        self.compute_loss_func = loss_fn

    def divided(self, loss, items):
        if (not self.model_accepts_loss_kwargs or items is None) and self.compute_loss_func is None:
            return loss / self.current_gradient_accumulation_steps
        return loss


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("loss_fn", [None, print])
@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_old_trainer_divides_means_alone(accepts, loss_fn, items, is_scaled, monkeypatch):
    monkeypatch.delattr(Trainer, "loss_is_scaled_for_ga", raising=False)
    trainer = OldTrainer(accepts, loss_fn)
    loss = compat.scaled_for_accumulation(trainer, torch.tensor(2.0), is_scaled, items)
    assert trainer.divided(loss, items) == (2.0 if is_scaled else 0.5)


class OldLayer(GradientCheckpointingLayer):
    """Checkpoints its call with the hooks, as every layer did before transformers 5.23."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)

    def __call__(self, *args, **kwargs):
        return self._gradient_checkpointing_func(partial(super().__call__, **kwargs), *args)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale


def test_a_reentrant_checkpoint_is_seen_with_its_graph(monkeypatch):
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", nn.Module.__call__, raising=False)
    layer = OldLayer()
    seen = []

    def handler(module, call, *args, **kwargs):
        seen.append(call(*args, **kwargs))
        return seen[-1]

    function = compat.checkpoint_function(layer, handler)
    monkeypatch.setattr(layer, compat.CHECKPOINT_FUNCTION, function)
    x = torch.randn(2, 3, requires_grad=True)
    layer(x, scale=2.0)

    assert seen[0].requires_grad

    torch.testing.assert_close(seen[0], layer.linear(x) * 2.0)


def test_a_layer_without_checkpoints_has_no_entrance():
    assert compat.checkpoint_function(nn.Linear(2, 2), print) is None
