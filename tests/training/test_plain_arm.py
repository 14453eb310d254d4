"""Plain training beside constrained training: both are what they are by themselves, in every bit."""

import json
import logging

import numpy as np
import pytest
import torch
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config
from transformers import TrainerCallback

from hf_descent import DescentTrainer, cli
from hf_descent.evaluation import LayerProfile
from hf_descent.evaluation.comparison import Run
from hf_descent.runs import RunFolder


ROWS = classification_data(64, pad=False)
TEST = classification_data(48, seed=1, pad=False)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def history(trainer):
    timed = ("_runtime", "_per_second")
    return [
        {name: value for name, value in log.items() if not name.endswith(timed)}
        for log in trainer.state.log_history
    ]


def adapted():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query"])
    torch.manual_seed(7)
    return peft.get_peft_model(bert(dropout=0.1), lora)


def make(folder, start, **settings):
    args = config(folder, dual_warmup_steps=2, eval_strategy="steps", eval_steps=3, **settings)
    given = {"train_dataset": ROWS, "eval_dataset": TEST}
    if start == "model_init":
        return DescentTrainer(args=args, model_init=lambda: bert(dropout=0.1), **given)
    model = adapted() if start == "lora" else bert(dropout=0.1)
    return DescentTrainer(model, args, **given)


@pytest.mark.parametrize("start", ["model", "model_init", "lora"])
def test_both_arms_are_the_trainings_that_they_would_be_alone(tmp_path, start):
    both = make(tmp_path / "both", start)
    found = both.train_with_plain()
    alone = {}

    for objective in ("erm", "descent"):
        alone[objective] = make(tmp_path / objective, start, objective=objective)
        alone[objective].train()

    assert weights(both.model).equal(weights(alone["descent"].model))
    assert history(both) == history(alone["descent"])
    assert both.args.objective == "descent" and both.args.output_dir == str(tmp_path / "both")

    state = json.loads((tmp_path / "both" / "_plain" / "trainer_state.json").read_text())
    losses = [log["loss"] for log in state["log_history"] if "loss" in log]

    assert losses == [log["loss"] for log in alone["erm"].state.log_history if "loss" in log]

    for profile, objective in ((found.plain, "erm"), (found.trained, "descent")):
        expected = alone[objective].evaluate_layers()
        np.testing.assert_array_equal(profile.losses, expected.losses)
        np.testing.assert_array_equal(profile.values, expected.values)

    assert found.price == pytest.approx(found.trained.losses[-1] / found.plain.losses[-1] - 1)


def test_the_plain_run_has_a_folder_of_its_own_and_is_told_beside_the_other(tmp_path, caplog):
    asked = {"loss_targets": {1: 0.5}, "descent_alpha": None, "dual_learning_rate": 1.0}
    caplog.set_level(logging.INFO, "hf_descent")
    trainer = make(tmp_path, "model", learning_rate=3e-2, max_steps=20, **asked)
    found = trainer.train_with_plain()
    plain = Run.load(str(tmp_path / "_plain"), needs_curve=False)

    assert plain.summary["objective"] == "erm" and plain.seed == trainer.args.seed
    assert (tmp_path / "_plain" / "model.safetensors").exists()

    text = str(found)
    own = found.trained.losses
    other = found.plain.losses

    for layer in (1, 2, 3):
        line = text.splitlines()[layer].split()
        assert line[:5] == [
            f"{layer}",
            f"{other[layer - 1]:.4g}",
            f"{own[layer - 1]:.4g}",
            f"{100 * (own[layer - 1] / other[layer - 1] - 1):+.1f}",
            "%",
        ]

    price = (
        f"{own[-1]:.4g}, plain training {other[-1]:.4g} ({100 * found.price:+.1f} %, 95 % interval "
    )

    assert f"Last layer: {price}" in text and "bound_1" in text
    assert "Plain training does not meet this constraint." in text and "price" in text
    cost = f"{100 * (own[0] / other[-1] - 1):+.1f} %"
    assert f"Cut after layer 1, the loss is {cost} against all 3 layers of plain training." in text
    assert text.endswith(found.certificate.headline) and text.count("VERDICT") == 1
    # What it returns is printed by the user, so nothing of it is logged.
    assert "Plain training does not meet" not in caplog.text
    assert caplog.text.count("Layers are read by") == 1
    assert found.plain_certificate.rows == found.certificate.rows == ["bound_1"]
    # In verdicts, in files and on the card.
    assert price in str(trainer.evaluate_layers().certificate())

    caplog.clear()
    trainer.evaluate()

    assert price in caplog.text

    trainer.save_model()
    trainer.create_model_card()

    assert price in (tmp_path / "README.md").read_text()

    # Of other data, or other settings, the plain run says nothing.
    for trainer_data, factor in ((ROWS, 1), (None, 2)):
        trainer.args.learning_rate *= factor
        assert "was not measured on these data" in str(
            trainer.evaluate_layers(trainer_data).certificate()
        )


class Killed(TrainerCallback):
    """Ends the process, so to speak, in one of the two trainings."""

    def __init__(self, objective, step):
        self.objective = objective
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if (args.objective, state.global_step) == (self.objective, self.step):
            raise KeyboardInterrupt


def test_a_killed_training_goes_on_and_knows_its_price(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path / "whole", "model", **saves).train_with_plain()
    trainer = make(tmp_path / "killed", "model", **saves)
    trainer.add_callback(Killed("descent", 3))

    with pytest.raises(KeyboardInterrupt):
        trainer.train_with_plain()

    assert trainer.args.objective == "descent"

    again = make(tmp_path / "killed", "model", **saves)
    again.train(resume_from_checkpoint=True)
    profile = again.evaluate_layers()

    np.testing.assert_array_equal(profile.losses, whole.trained.losses)
    assert profile.certificate().price.plain == pytest.approx(whole.plain.losses[-1])


def test_what_cannot_be_compared_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="`objective` is 'erm', which is plain training itself"):
        make(tmp_path, "model", objective="erm").train_with_plain()

    model = bert()
    optimizers = (torch.optim.SGD(model.parameters()), None)
    args = config(tmp_path)
    given = {"train_dataset": ROWS, "eval_dataset": TEST}

    with pytest.raises(ValueError, match="`optimizers` are of one training.*optimizer_cls_and_kw"):
        DescentTrainer(model, args, optimizers=optimizers, **given).train_with_plain()
    with pytest.raises(ValueError, match="no `eval_dataset`"):
        DescentTrainer(model, args, train_dataset=ROWS).train_with_plain()

    sets = DescentTrainer(model, args, train_dataset=ROWS, eval_dataset={"a": TEST, "b": ROWS})

    with pytest.raises(ValueError, match="several evaluation sets"):
        sets.train_with_plain()

    assert sets.train_with_plain(eval_dataset="a").trained.losses.shape == (3,)

    profile = LayerProfile.from_json(str(tmp_path / "_plain" / "layer_profile.json"))

    assert profile.problem is not None


def test_a_saved_model_has_what_was_measured_of_it(tmp_path, capsys):
    """The card of a later command knows it; of other weights it knows nothing."""
    trainer = make(tmp_path, "model")
    trainer.train_with_plain()
    trainer.save_model()
    cli.main(["card", str(tmp_path)])
    card = (tmp_path / "README.md").read_text()
    assert "was not measured on held-out data" not in card
    assert trainer.evaluate_layers().certificate().headline in card

    trainer.args.eval_strategy = "no"
    trainer.train()
    trainer.save_model()
    assert not RunFolder(tmp_path).fresh("verdict.json")
    assert not RunFolder(tmp_path).fresh("layer_profile.json")
