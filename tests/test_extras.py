"""The core without the packages that only a part of this one needs."""

import configparser
import re
import sys

import pytest
from programs import ROOT, python

from hf_descent.extras import EXTRAS, extra_needed, is_dataset, is_installed


CORE = {"accelerate", "numpy", "pyyaml", "safetensors", "torch", "transformers"}
# What a plain environment does not have, with what these would bring along.
ABSENT = (*EXTRAS, "PIL", "pandas", "pyarrow", "tensorboard", "trackio")
TRAINING = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
import torch
from transformers import BertConfig, BertForSequenceClassification
from hf_descent import DescentConfig, DescentTrainer
sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(BertConfig(**sizes, num_labels=3))
rows = [{{"input_ids": torch.randint(5, 50, (6,)), "labels": row % 3}} for row in range(64)]
args = DescentConfig(sys.argv[1], max_steps=2, report_to="none", use_cpu=True, per_device_train_batch_size=4)
trainer = DescentTrainer(model, args, train_dataset=rows, eval_dataset=rows)
trainer.train()
assert trainer.state.global_step == 2 and trainer.multipliers is not None
trainer.evaluate()
trainer.evaluate_layers().certificate()
trainer.save_model()
trainer.create_model_card()
"""


def test_the_core_trains_without_the_extras(tmp_path):
    python("-c", TRAINING, tmp_path)
    assert "model_card.json" in {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*.svg"))  # figures are left out


def test_the_core_is_all_that_is_installed_without_extras():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.MULTILINE)) == CORE


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert not is_installed("scipy")
    message = r"The comparison needs scipy: `pip install 'hf_descent\[commands\]'`"
    with pytest.raises(ImportError, match=message), extra_needed("The comparison"):
        import scipy  # noqa: F401


def test_a_module_of_no_extra_stays_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), extra_needed("This"):
        import no_such_module  # noqa: F401


def test_rows_are_a_dataset_only_where_the_package_is_there(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [1]})
    assert is_dataset(rows) and not is_dataset([{"x": 1}])
    monkeypatch.delitem(sys.modules, "datasets")
    assert not is_dataset([{"x": 1}])
