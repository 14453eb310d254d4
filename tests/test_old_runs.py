"""What version 0.1 left behind is read and resumed: `run_of_0.1`, a run of six steps stopped after the third."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import fitted
from transformers import AutoModelForSequenceClassification

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.evaluation import LayerProfile, NoiseCurve
from hf_descent.evaluation.comparison import Run, compare
from hf_descent.hub.facts import collect
from hf_descent.hub.render import render


OLD = Path(__file__).with_name("run_of_0.1")
EXPECTED = json.loads(
    (OLD / "expected.json").read_text()
)  # what that version went on to, on the same data


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(OLD, tmp_path / "run")


def test_a_run_is_resumed_as_it_would_have_gone_on(run):
    args = torch.load(run / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert type(args) is DescentConfig and args.descent_alpha == 0.05
    data = classification_data(16)
    given = {
        name: getattr(args, name) for name in ("descent_alpha", "seed", "max_steps", "resilience")
    }
    args = DescentConfig(
        output_dir=str(run), initial_loss_bound=1.2, dual_warmup_steps=1, dual_learning_rate=0.1, learning_rate=1e-3,
        per_device_train_batch_size=8, save_strategy="no", logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, noise_gamma=0.3, eval_gammas=[0.0, 1.0], **given,
    )  # fmt: skip
    trainer = fitted(
        DescentTrainer(bert(num_layers=2), args, train_dataset=data, eval_dataset=data),
        checkpoint=True,
    )
    # Adam's corrections for the first steps had rounding errors of some 1e-5 in those versions.
    assert trainer.multipliers.values.tolist() == pytest.approx(EXPECTED["multipliers"], rel=1e-5)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(EXPECTED["losses"], rel=1e-6)
    evaluation = trainer.evaluate()
    for name in ("eval_loss", "eval_layer_loss_1", "eval_layer_loss_2", "eval_max_violation"):
        assert evaluation[name] == pytest.approx(EXPECTED["evaluation"][name], rel=1e-5), name


def test_its_model_is_evaluated_against_its_own_constraints(run, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(run)
    args = DescentConfig(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True)
    evaluation = DescentTrainer(model, args, eval_dataset=classification_data(16)).evaluate()
    assert evaluation["eval_max_violation"] == pytest.approx(
        EXPECTED["evaluation"]["eval_max_violation"], rel=1e-5
    )


@pytest.mark.parametrize("objective", ["descent", "fixed"])
def test_an_f_0_that_was_set_above_chance_makes_no_layer_at_chance_met(run, tmp_path, objective):
    model = AutoModelForSequenceClassification.from_pretrained(run)
    torch.nn.init.zeros_(model.classifier.weight)
    args = DescentConfig(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, per_device_eval_batch_size=2, max_steps=1,
        learning_rate=0.0, objective=objective, fixed_multipliers=str(run) if objective == "fixed" else None,
    )  # fmt: skip
    summary = json.loads((run / "descent_config.json").read_text())
    changed = {
        "initial_loss_bound": 1.6,
        "alpha": [0.05, 0.05],
        "constrained_layers": [1],
        "multipliers": [0.0, 0.0],
    }
    (run / "descent_config.json").write_text(json.dumps(summary | changed))
    trainer = DescentTrainer(
        model, args, train_dataset=classification_data(16), eval_dataset=classification_data(16)
    )
    if objective == "fixed":
        trainer.train()
    assert trainer.evaluate()["eval_feasible"] == 0 and trainer.problem.initial_loss_bound == 1.6


def test_its_results_are_read(run):
    curve, profile = (kind.from_json(run / f"{name}.json") for kind, name in (
        (NoiseCurve, "noise_curve"), (LayerProfile, "layer_profile"),
    ))  # fmt: skip
    assert curve.gammas.tolist() == [0.0, 1.0] and len(profile.losses) == 2
    card = collect(run)
    assert card["noise_curve"]["text"] == str(curve) and card["layer_profile"]["text"] == str(
        profile
    )
    assert card["settings"]["descent_alpha"] == 0.05 and card["model_name"] == "old"
    assert "Version 0.1 trained this model. What it called feasible asked for less" in str(
        render(card)
    )


def test_what_it_measured_is_not_judged_by_today_s_rule(run):
    assert LayerProfile.from_json(run / "layer_profile.json").feasible is None
    assert Run.load(str(run)).certificate is None
    with pytest.raises(ValueError, match="or by an earlier version; run `hf-descent evaluate`"):
        compare({"old": [str(run)], "same": [str(run)]})
