"""Ways to split a model that leave no process with whole rows, or no parameter whole, are refused at the start."""

from types import SimpleNamespace

import pytest
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config
from transformers import Trainer, TrainingArguments

from hf_descent import DescentTrainer


def make(tmp_path, **arguments):
    return DescentTrainer(
        bert(), config(tmp_path, **arguments), train_dataset=classification_data(8)
    )


@pytest.mark.parametrize("kind", ["tensor", "context", "sequence"])
def test_parallelism_within_a_row_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(Trainer, f"get_{kind[0]}p_size", lambda self: 2)
    with pytest.raises(
        ValueError,
        match=f"{kind.capitalize()} parallelism is not supported.*DDP, FSDP2 or DeepSpeed",
    ):
        make(tmp_path)
    make(tmp_path, objective="erm", descent_alpha=None)


def test_a_static_graph_of_several_processes_is_refused(tmp_path, monkeypatch):
    make(tmp_path, ddp_static_graph=True)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="`ddp_static_graph=True` is not supported"):
        make(tmp_path, ddp_static_graph=True)


def test_fsdp1_is_refused(tmp_path, monkeypatch):
    create = Trainer.create_accelerator_and_postprocess

    def with_fsdp1(self):
        create(self)
        self.is_fsdp_enabled = True
        self.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", with_fsdp1)
    with pytest.raises(ValueError, match="set `fsdp_version: 2`"):
        make(tmp_path)
