"""What is recorded of arguments tells ways of training apart; it is plain JSON without secrets and folders."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config, trained

from hf_descent import DescentConfig
from hf_descent.runs import training_arguments


def recorded(args):
    return json.loads(json.dumps(training_arguments(args)))


def way(args):
    """What the runs that are seeds of one training have in common."""
    return {name: value for name, value in recorded(args).items() if name != "seed"}


@pytest.mark.parametrize(
    "options",
    [
        {"adam_beta1": 0.8},
        {"adam_epsilon": 1e-6},
        {"bf16": True},
        {"data_seed": 7},
        {"dataloader_drop_last": True},
        {"lr_scheduler_kwargs": {"num_cycles": 2}},
        {"optim_args": "a=1"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_other_setting_makes_another_way_of_training(tmp_path, options):
    alike = [
        config(tmp_path, lr_scheduler_type="cosine_with_restarts", seed=seed) for seed in (1, 2)
    ]
    other = config(tmp_path, lr_scheduler_type="cosine_with_restarts", seed=3, **options)
    assert way(alike[0]) == way(alike[1]) != way(other)
    name, value = next(iter(options.items()))
    assert recorded(other)[name] == value and name not in recorded(alike[0])


def test_what_is_saved_and_reported_makes_no_other_way_of_training(tmp_path):
    changes = {
        "dataloader_num_workers": 2, "do_eval": True, "eval_steps": 7, "eval_strategy": "steps", "hub_model_id": "a/b",
        "hub_token": "hf_secret", "logging_steps": 3, "run_name": "mine", "save_steps": 9, "save_strategy": "steps",
    }  # fmt: skip
    other = config(
        tmp_path / "other", seed=2, data_seed=2, **changes
    )  # the seed of the data is that of training
    assert recorded(other) == recorded(config(tmp_path, seed=2)) | {"data_seed": 2}


def test_the_arguments_of_trl_are_recorded(tmp_path):
    pytest.importorskip("trl")
    from hf_descent import SFTDescentConfig

    settings = {"report_to": "none", "use_cpu": True, "bf16": False}
    ways = (
        {},
        {"max_length": None},
        {"max_length": 64},
        {"completion_only_loss": True},
        {"packing": True},
    )
    found = [way(SFTDescentConfig(str(tmp_path), **each, **settings)) for each in ways]
    assert all(found.count(each) == 1 for each in found)
    tokens = SFTDescentConfig(str(tmp_path), eos_token="</s>", hub_token="hf_secret", **settings)
    assert recorded(tokens)["eos_token"] == "</s>" and "hf_secret" not in json.dumps(
        recorded(tokens)
    )


@dataclass
class OwnConfig(DescentConfig):
    api_key: str | None = None
    base: str | None = None
    load: dict = field(default_factory=dict)
    table: list = field(default_factory=list)


def test_a_run_records_plain_values_without_secrets_and_folders(tmp_path):
    given = {
        "token": "hf_secret",
        "dtype": torch.bfloat16,
        "nested": {"password": "secret", "rows": (1, 2)},
    }
    args = OwnConfig(
        str(tmp_path), report_to="none", use_cpu=True, save_strategy="no", max_steps=2, descent_alpha=0.3,
        initial_loss_bound=1.0, dual_warmup_steps=0, api_key="secret", hub_token="hf_secret", base=str(tmp_path),
        load=given | {"hook": object()},
    )  # fmt: skip
    trainer = trained(bert(), args, train_dataset=classification_data(16))
    trainer.save_model()
    trainer.create_model_card()
    found = json.loads((tmp_path / "descent_config.json").read_text())["arguments"]
    assert found["load"] == {
        "dtype": "torch.bfloat16",
        "nested": {"rows": [1, 2]},
        "hook": "<object object>",
    }
    assert found["base"] == tmp_path.name and not {"api_key", "hub_token", "table"} & found.keys()
    card = (tmp_path / "README.md").read_text()
    assert f"| `base` | {tmp_path.name} |" in card and "secret" not in card + json.dumps(found)
    assert found.keys() - recorded(config(tmp_path)).keys() == {"base", "load"}
