"""Plain training is evaluated as by Trainer, and tells how its layers descend."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny.data import classification_data, language_data
from tiny.models import bert, llama, spread
from tiny.oracles import truncated
from tiny.training import config, trained
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_descent import DescentTrainer
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.runs import RunFolder


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)
ROWS = classification_data(250, pad=False)
LAYERS = (1, 2, 3)


def stock(tmp_path, model, rows, **arguments):
    arguments = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, **arguments}
    return Trainer(model, TrainingArguments(str(tmp_path), **arguments), eval_dataset=rows)


def evaluated_and_drawn(trainer):
    torch.manual_seed(1)
    return trainer.evaluate(), torch.rand(()).item()


def layer_losses_of(metrics):
    return [metrics[f"eval_layer_loss_{layer}"] for layer in LAYERS]


@pytest.fixture(scope="module")
def plainly_trained(tmp_path_factory):
    """A trainer that has trained plainly, with evaluations, and what it evaluated before."""
    args = config(
        tmp_path_factory.mktemp("plain"),
        objective="erm",
        max_steps=90,
        eval_strategy="steps",
        eval_steps=30,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=8,
    )
    trainer = DescentTrainer(bert(), args, train_dataset=ROWS, eval_dataset=ROWS)
    before = trainer.evaluate()
    trainer.train()
    return trainer, before


def losses_of_truncated_models(folder, model):
    """f_1..f_L on the rows, as Trainer evaluates the model cut to each layer."""
    losses = []
    for layer in LAYERS:
        cut = stock(folder, truncated(model, layer), ROWS, per_device_eval_batch_size=250)
        losses.append(cut.evaluate()["eval_loss"])
    return losses


def test_plain_evaluation_keeps_the_loss_and_the_draws_of_trainer(tmp_path, plainly_trained):
    trainer, _ = plainly_trained
    by_trainer = stock(tmp_path, trainer.model, ROWS, per_device_eval_batch_size=8)
    metrics, drawn = evaluated_and_drawn(trainer)
    expected, drawn_by_stock = evaluated_and_drawn(by_trainer)
    assert metrics["eval_loss"] == expected["eval_loss"]
    assert drawn == drawn_by_stock
    assert trainer.multipliers is None
    predicted = trainer.predict(ROWS).metrics
    assert [predicted[f"test_layer_loss_{layer}"] for layer in LAYERS] == layer_losses_of(metrics)


def test_evaluations_during_plain_training_tell_how_its_layers_descend(plainly_trained):
    trainer, _ = plainly_trained
    logs = [log for log in trainer.state.log_history if "eval_loss" in log]
    in_training = logs[:3]  # after 30, 60 and 90 steps
    assert [log["step"] for log in in_training] == [30, 60, 90]
    assert all("eval_largest_rise" in log for log in in_training)
    metrics = trainer.evaluate()
    for name in ("eval_loss", "eval_layer_loss_1", "eval_descent_share", "eval_largest_rise"):
        assert in_training[-1][name] == metrics[name]


def test_the_layer_losses_of_plain_training_are_those_of_truncated_models(
    tmp_path, plainly_trained
):
    trainer, _ = plainly_trained
    losses = losses_of_truncated_models(tmp_path, trainer.model)
    assert layer_losses_of(trainer.evaluate()) == pytest.approx(losses, rel=1e-5)


def test_share_and_rise_follow_from_the_layer_losses_and_the_labels(plainly_trained):
    trainer, _ = plainly_trained
    metrics = trainer.evaluate()
    losses = layer_losses_of(metrics)

    frequencies = np.bincount([row["labels"] for row in ROWS]) / len(ROWS)
    chance = -frequencies @ np.log(frequencies)
    first, second, last = (math.log(chance / loss) for loss in losses)
    share = min(3 * first / last, 3 / 2 * second / last)
    assert metrics["eval_descent_share"] == pytest.approx(share, rel=1e-4)

    rises = [above / below - 1 for below, above in pairwise(losses)]
    assert metrics["eval_largest_rise"] == pytest.approx(max(rises), rel=1e-4)


def test_the_card_of_plain_training_says_how_its_layers_descend(plainly_trained):
    trainer, _ = plainly_trained
    metrics = trainer.evaluate()
    trainer.create_model_card()

    text = RunFolder(trainer.args.output_dir).path.joinpath("README.md").read_text()
    card = " ".join(text.split("## Load it")[0].split())
    loss = metrics["eval_loss"]
    share = metrics["eval_descent_share"]
    assert "this model was not trained to meet it" in card
    assert f"f_L = {loss:.4g} over 250 items, descent share {share:.2f}" in card


def test_there_is_no_share_where_the_last_layer_is_not_shown_to_be_below_chance(plainly_trained):
    trainer, before_training = plainly_trained
    assert "eval_layer_loss_1" in before_training
    assert "eval_descent_share" not in before_training
    assert "eval_descent_share" not in trainer.evaluate(ROWS[:20])


def denoiser():
    torch.manual_seed(0)
    settings = UTConfig(hidden_size=16, num_hidden_layers=3, attention_step=0.5)
    return UTForVideoDenoising(settings)


def frames(factor):
    """Frames whose labels are that much of them."""
    torch.manual_seed(1)
    return [{"pixel_values": frame, "labels": factor * frame} for frame in torch.rand(32, 4, 16)]


def rows_of_one_label():
    return [{**row, "labels": torch.tensor(1)} for row in DATA_TEST]


@pytest.mark.parametrize(
    ("make", "rows", "metric"),
    [
        (denoiser, frames(0.5), "rmse"),
        (denoiser, frames(1.0), "rmse"),  # of which what is given has no loss
        (lambda: spread(bert()), rows_of_one_label(), "accuracy"),  # of which a constant has none
        (lambda: spread(llama()), language_data(32, ragged=False), "accuracy"),
    ],
    ids=["denoiser", "clean frames", "one label", "language"],
)
def test_the_last_layer_of_plain_training_has_the_loss_of_the_evaluation(
    tmp_path, make, rows, metric
):
    trainer = DescentTrainer(make(), config(tmp_path, objective="erm"), eval_dataset=rows)
    metrics = trainer.evaluate()
    assert metrics["eval_layer_loss_3"] == pytest.approx(metrics["eval_loss"], rel=1e-3)
    assert metrics["eval_layer_loss_1"] != pytest.approx(metrics["eval_loss"], rel=2e-3)
    assert trainer.evaluate_layers().metric == metric


class Weighed(DescentTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class NoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(10, 3)

    def forward(self, input_ids, labels, attention_mask=None):
        logits = self.linear(input_ids.float())
        return F.cross_entropy(logits, labels) + 0 * torch.rand(()), logits  # draws


@pytest.mark.parametrize(
    ("trainer_class", "model", "factor"),
    [(Weighed, bert(), 2), (DescentTrainer, NoLayers(), 1)],
    ids=["loss of its own", "no layers"],
)
def test_plain_training_of_what_has_no_readable_layers_is_evaluated_as_by_trainer(
    tmp_path, trainer_class, model, factor
):
    args = config(tmp_path, objective="erm", descent_alpha=None)
    trainer = trainer_class(model, args, eval_dataset=DATA_TEST)
    metrics, drawn = evaluated_and_drawn(trainer)
    expected, drawn_by_stock = evaluated_and_drawn(stock(tmp_path, model, DATA_TEST))
    assert metrics["eval_loss"] == factor * expected["eval_loss"]
    assert drawn == drawn_by_stock
    assert not any("layer" in name or "rise" in name for name in metrics)


STATED = {
    "a step size": {},
    "targets": {"descent_alpha": None, "exit_targets": {1: 0.1}},
    "a metric": {"descent_alpha": None, "metric_for_best_model": "feasible_score"},
    "a metric of a set": {"descent_alpha": None, "metric_for_best_model": "eval_a_layer_loss_2"},
}


@pytest.mark.parametrize("asked", STATED)
def test_layers_that_cannot_be_read_are_refused_before_the_first_step(tmp_path, asked):
    args = config(tmp_path, objective="erm", **STATED[asked])
    trainer = DescentTrainer(NoLayers(), args, train_dataset=DATA, eval_dataset={"a": DATA_TEST})
    for read in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=": leave these out if you do not need"):
            read()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("asked", STATED)
def test_layers_beside_a_loss_of_ones_own_are_refused_at_once(tmp_path, asked):
    args = config(tmp_path, objective="erm", **STATED[asked])
    with pytest.raises(ValueError, match="^.*`Weighed.compute_loss` is a loss.*leave these out"):
        Weighed(bert(), args, train_dataset=DATA, eval_dataset={"a": DATA_TEST})


def test_a_checkpoint_of_plain_training_may_be_chosen_by_its_layers(tmp_path):
    args = config(
        tmp_path,
        objective="erm",
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        metric_for_best_model="feasible_score",
        load_best_model_at_end=True,
    )
    trainer = trained(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
    logs = [log for log in trainer.state.log_history if "eval_feasible_score" in log]
    assert trainer.state.best_metric == max(log["eval_feasible_score"] for log in logs)


class Batches(list):
    """A loader without a data set."""


class OwnLoader(DescentTrainer):
    """Reads every other batch, with other labels than the data set has."""

    def get_eval_dataloader(self, eval_dataset=None):
        batches = list(super().get_eval_dataloader(eval_dataset))
        return Batches({**batch, "labels": (batch["labels"] + 1) % 3} for batch in batches[::2])


def test_the_layers_of_plain_training_are_those_of_the_rows_that_trainer_evaluates(tmp_path):
    """Whatever loader gives them; with the numbers of an objective that reads the layers itself."""

    def evaluated(objective):
        args = config(tmp_path, objective=objective)
        return OwnLoader(spread(bert()), args, eval_dataset=DATA_TEST).evaluate()

    plain = evaluated("erm")
    reading = evaluated("deep_supervision")
    names = [name for name in plain if "layer" in name or "rise" in name]
    assert len(names) == 4
    assert [plain[name] for name in names] == [reading[name] for name in names]
    assert plain["eval_loss"] == pytest.approx(plain["eval_layer_loss_3"], rel=1e-4)


def test_a_collator_that_draws_by_itself_draws_for_plain_training_as_for_trainer(tmp_path):
    args = config(tmp_path, objective="erm", max_steps=4, eval_strategy="steps", eval_steps=2)
    rows = classification_data(24, pad=False)

    def losses(trainer_class):
        generator = torch.Generator().manual_seed(1)

        def collate(rows):
            labels = torch.randint(3, (8,), generator=generator)
            return {**default_data_collator(rows), "labels": labels}

        trainer = trainer_class(
            bert(), args, train_dataset=rows, eval_dataset=rows, data_collator=collate
        )
        trainer.train()
        logs = trainer.state.log_history
        return [log[name] for log in logs for name in ("loss", "eval_loss") if name in log]

    expected = losses(Trainer)
    assert len(expected) == 6
    assert losses(DescentTrainer) == expected
