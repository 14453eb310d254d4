import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from noisy import vit
from tiny.data import batches, classification_data, language_data
from tiny.models import bert, gpt2, llama, spread
from tiny.oracles import naive_layer_losses, truncated
from tiny.training import config, trained
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_descent import DescentProblem, DescentTrainer, layer_profile
from hf_descent.constraints.objectives import OBJECTIVES
from hf_descent.evaluation import layer_profiles
from hf_descent.evaluation.row_sums import RowSums
from hf_descent.losses.chance import entropy
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.runs import RunFolder


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)
Batches = type("Batches", (list,), {})  # a loader without a data set


@pytest.mark.parametrize("objective", [{}, {"objective": "fixed", "fixed_multipliers": [1.0] * 3}])
def test_evaluation_before_training_and_by_batches_of_unequal_size(tmp_path, objective):
    args = config(tmp_path, per_device_eval_batch_size=7, **objective)
    metrics = DescentTrainer(bert(), args, eval_dataset=DATA_TEST).evaluate()
    whole = next(batches(DATA_TEST, 32))
    model = bert().eval()
    with torch.no_grad():
        expected = naive_layer_losses(model, whole).tolist()
    assert [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
        expected, rel=1e-5
    )
    assert "eval_feasible" in metrics


def test_equal_losses_of_many_batches_are_not_less_in_the_mean():
    rows = RowSums()
    batch = torch.tensor([[math.log(2)] * 2 + [1.0]] * 8)
    for _ in range(12_800):  # added up in float32 1.7e-6 less
        rows = rows.plus(batch)
    sums = rows.gathered(False).sums
    assert (sums[:, :2] / sums[:, 2:]).ravel() == pytest.approx(math.log(2), rel=1e-7)


def stock(tmp_path, model, rows, **arguments):
    arguments = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, **arguments}
    return Trainer(model, TrainingArguments(str(tmp_path), **arguments), eval_dataset=rows)


def evaluated_and_drawn(trainer):
    torch.manual_seed(1)
    return trainer.evaluate(), torch.rand(()).item()


LAYERS = (1, 2, 3)
PLAIN_ROWS = classification_data(250, pad=False)


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
    trainer = DescentTrainer(bert(), args, train_dataset=PLAIN_ROWS, eval_dataset=PLAIN_ROWS)
    before = trainer.evaluate()
    trainer.train()
    return trainer, before


def losses_of_truncated_models(folder, model):
    """f_1..f_L on the rows, as Trainer evaluates the model cut to each layer."""
    losses = []
    for layer in LAYERS:
        cut = stock(folder, truncated(model, layer), PLAIN_ROWS, per_device_eval_batch_size=250)
        losses.append(cut.evaluate()["eval_loss"])
    return losses


def test_plain_evaluation_keeps_the_loss_and_the_draws_of_trainer(tmp_path, plainly_trained):
    trainer, _ = plainly_trained
    by_trainer = stock(tmp_path, trainer.model, PLAIN_ROWS, per_device_eval_batch_size=8)
    metrics, drawn = evaluated_and_drawn(trainer)
    expected, drawn_by_stock = evaluated_and_drawn(by_trainer)
    assert metrics["eval_loss"] == expected["eval_loss"]
    assert drawn == drawn_by_stock
    assert trainer.multipliers is None
    predicted = trainer.predict(PLAIN_ROWS).metrics
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
    """And share and rise follow from them and the entropy of the labels."""
    trainer, _ = plainly_trained
    metrics = trainer.evaluate()
    losses = losses_of_truncated_models(tmp_path, trainer.model)

    assert layer_losses_of(metrics) == pytest.approx(losses, rel=1e-5)

    frequencies = np.bincount([row["labels"] for row in PLAIN_ROWS]) / len(PLAIN_ROWS)
    chance = -frequencies @ np.log(frequencies)
    first, second, last = (math.log(chance / loss) for loss in losses)
    share = min(3 * first / last, 3 / 2 * second / last)

    assert metrics["eval_descent_share"] == pytest.approx(share, rel=1e-4)

    rises = [above / below - 1 for below, above in pairwise(losses)]

    assert metrics["eval_largest_rise"] == pytest.approx(max(rises), rel=1e-4)

    trainer.create_model_card()
    text = RunFolder(trainer.args.output_dir).path.joinpath("README.md").read_text()
    card = " ".join(text.split("## Load it")[0].split())

    assert "this model was not trained to meet it" in card
    assert f"f_L = {losses[-1]:.4g} over 250 items, descent share {share:.2f}" in card


def test_there_is_no_share_where_the_last_layer_is_not_shown_to_be_below_chance(plainly_trained):
    trainer, before_training = plainly_trained
    assert "eval_layer_loss_1" in before_training
    assert "eval_descent_share" not in before_training
    assert "eval_descent_share" not in trainer.evaluate(PLAIN_ROWS[:20])


@pytest.mark.parametrize(
    ("objective", "asked"),
    [
        *((objective, {"exit_targets": {1: 0.5, 2: 0.25}}) for objective in OBJECTIVES),
        ("erm", {"loss_targets": {2: 0.9}}),
        ("erm", {"descent_alpha": "steps", "descent_strength": 0.4}),
        *((objective, {}) for objective in OBJECTIVES[:4]),
    ],
)
def test_the_same_script_is_judged_by_what_it_states_whatever_its_objective(
    tmp_path, objective, asked
):
    """By the problem that its arguments state, written out here, with the f_0 of the training labels."""
    rows = classification_data(200, pad=False)
    held_out = classification_data(80, seed=1, pad=False)
    shared = {"descent_alpha": None, "initial_loss_bound": "auto", "per_device_eval_batch_size": 8}
    if objective == "fixed":
        shared["fixed_multipliers"] = [0.1] * DescentProblem(**stated(asked, 1.0)).num_rows
    args = config(tmp_path, objective=objective, max_steps=60, learning_rate=3e-3, **shared | asked)
    trainer = DescentTrainer(bert(), args, train_dataset=rows, eval_dataset=held_out)
    trainer.train()
    metrics = trainer.evaluate()
    chance = entropy(np.bincount([row["labels"] for row in rows]))
    problem = DescentProblem(**stated(asked, chance))
    expected = layer_profile(trainer.model, held_out, batch_size=8, problem=problem).certificate()
    found = trainer.evaluate_layers().certificate()

    assert (found.rows, found.verdicts) == (expected.rows, expected.verdicts)

    np.testing.assert_allclose(found.asked, expected.asked, rtol=1e-4)
    np.testing.assert_allclose(found.reached, expected.reached, rtol=1e-4)

    assert (found.multipliers is not None) == (objective in ("descent", "fixed"))

    trainer.save_model()

    if objective == "erm" and not asked:
        assert not any("layer" in name or "feasible" in name for name in metrics)
    else:
        assert metrics["eval_feasible"] == expected.feasible
        assert metrics["eval_max_violation"] == pytest.approx(expected.max_violation, abs=1e-4)

    saved = DescentProblem.saved_in(RunFolder(tmp_path).summary)

    assert saved.rows == problem.rows
    assert saved.initial_loss_bound == pytest.approx(problem.initial_loss_bound)


def stated(asked, bound):
    """The arguments of the problem that training arguments state for three layers."""
    alpha = asked.get("descent_alpha", None if asked else "line")
    targets = {name: asked.get(name) for name in ("exit_targets", "loss_targets")}
    return {
        "alpha": alpha,
        "initial_loss_bound": bound,
        "num_layers": 3,
        "chance_loss": bound,
        "descent_strength": asked.get("descent_strength", 0.5),
        **targets,
    }


def test_plain_training_is_judged_where_nothing_was_evaluated_before(tmp_path):
    shared = {"descent_alpha": None, "initial_loss_bound": "auto", "exit_targets": {1: 0.5}}
    rows = classification_data(200, pad=False)
    args = config(tmp_path, objective="erm", **shared)
    trainer = trained(bert(), args, train_dataset=rows, eval_dataset=DATA_TEST)
    assert trainer.evaluate_layers().certificate().rows == ["exit_1"]
    chance = entropy(np.bincount([row["labels"] for row in rows]))
    assert trainer.problem.chance_loss == pytest.approx(chance)
    with pytest.raises(ValueError, match="`exit_targets`.*layers 1 to 2"):
        DescentTrainer(bert(), config(tmp_path, objective="erm", exit_targets={3: 0.1}))


def test_targets_that_cannot_be_judged_are_told(tmp_path, caplog):
    def custom(outputs, labels, num_items_in_batch=None):
        return outputs.logits.square().mean()

    args = config(tmp_path, objective="erm", initial_loss_bound="auto", exit_targets={1: 0.1})
    trainer = DescentTrainer(bert(), args, eval_dataset=DATA_TEST, layer_loss_fn=custom)
    trainer.evaluate()
    assert "targets are not judged" in caplog.text


STATED = {
    "a step size": {},
    "targets": {"descent_alpha": None, "exit_targets": {1: 0.1}},
    "a metric": {"descent_alpha": None, "metric_for_best_model": "feasible_score"},
    "a metric of a set": {"descent_alpha": None, "metric_for_best_model": "eval_a_layer_loss_2"},
}


@pytest.mark.parametrize("asked", STATED)
def test_layers_of_plain_training_that_cannot_be_read_are_refused_before_its_first_step(
    tmp_path, asked
):
    args = config(tmp_path, objective="erm", **STATED[asked])
    data = {"train_dataset": DATA, "eval_dataset": {"a": DATA_TEST}}
    unread = DescentTrainer(NoLayers(), args, **data)
    for read in (unread.train, unread.evaluate):
        with pytest.raises(ValueError, match="leave these out, for the layers cannot be read"):
            read()
    assert unread.state.global_step == 0
    with pytest.raises(ValueError, match="leave these out.*`Weighed.compute_loss` is a loss"):
        DescentTrainer.__init__(Weighed.__new__(Weighed), bert(), args, **data)


def test_a_checkpoint_of_plain_training_may_be_chosen_by_its_layers_where_they_can_be_read(
    tmp_path,
):
    steps = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    args = config(
        tmp_path, objective="erm", metric_for_best_model="feasible_score", save_steps=2,
        load_best_model_at_end=True, **steps,
    )  # fmt: skip
    trainer = trained(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
    logs = [log for log in trainer.state.log_history if "eval_feasible_score" in log]
    assert trainer.state.best_metric == max(log["eval_feasible_score"] for log in logs)


def test_the_last_layer_of_plain_training_has_the_loss_of_the_evaluation(tmp_path):
    torch.manual_seed(0)
    denoiser = UTForVideoDenoising(
        UTConfig(hidden_size=16, num_hidden_layers=3, attention_step=0.5)
    )
    frames = [{"pixel_values": frame, "labels": frame / 2} for frame in torch.rand(32, 4, 16)]
    clean = [
        dict(row, labels=row["pixel_values"]) for row in frames
    ]  # what is given, or a constant, has no loss
    alike = [dict(row, labels=torch.tensor(1)) for row in DATA_TEST]
    texts = language_data(32, ragged=False)

    for model, rows in zip(
        (denoiser, denoiser, spread(bert()), spread(llama())), (frames, clean, alike, texts)
    ):
        trainer = DescentTrainer(model, config(tmp_path, objective="erm"), eval_dataset=rows)
        metrics = trainer.evaluate()
        assert trainer.evaluate_layers().metric == ("rmse" if model is denoiser else "accuracy")
        assert metrics["eval_layer_loss_3"] == pytest.approx(metrics["eval_loss"], rel=1e-3)
        assert metrics["eval_layer_loss_1"] != pytest.approx(metrics["eval_loss"], rel=2e-3)


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


def test_plain_training_of_what_has_no_readable_layers_is_evaluated_as_by_trainer(tmp_path):
    args = config(tmp_path, objective="erm", descent_alpha=None)
    for kind, model, factor in ((Weighed, bert(), 2), (DescentTrainer, NoLayers(), 1)):
        metrics, drawn = evaluated_and_drawn(kind(model, args, eval_dataset=DATA_TEST))
        expected, drawn_by_stock = evaluated_and_drawn(stock(tmp_path, model, DATA_TEST))
        assert (metrics["eval_loss"], drawn) == (factor * expected["eval_loss"], drawn_by_stock)
        assert not any("layer" in name or "rise" in name for name in metrics)


class OwnLoader(DescentTrainer):  # every other row, with other labels than the data set has
    def get_eval_dataloader(self, eval_dataset=None):
        batches = list(super().get_eval_dataloader(eval_dataset))
        return Batches({**batch, "labels": (batch["labels"] + 1) % 3} for batch in batches[::2])


def test_the_layers_of_plain_training_are_those_of_the_rows_that_trainer_evaluates(tmp_path):
    """Whatever loader gives them; with the numbers of an objective that reads the layers itself."""
    found = []
    for objective in ("erm", "deep_supervision"):
        trainer = OwnLoader(
            spread(bert()), config(tmp_path, objective=objective), eval_dataset=DATA_TEST
        )
        found.append(trainer.evaluate())
    names = [name for name in found[0] if "layer" in name or "rise" in name]
    assert len(names) == 4 and found[0]["eval_loss"] == pytest.approx(
        found[0]["eval_layer_loss_3"], rel=1e-4
    )
    assert [found[0][name] for name in names] == [found[1][name] for name in names]


def test_a_collator_that_draws_by_itself_draws_for_plain_training_as_for_trainer(tmp_path):
    args = config(tmp_path, objective="erm", max_steps=4, eval_strategy="steps", eval_steps=2)
    rows = classification_data(24, pad=False)
    found = []

    for trainer_class in (Trainer, DescentTrainer):
        own = {"size": (8,), "generator": torch.Generator().manual_seed(1)}

        def collate(rows, own=own):
            return dict(default_data_collator(rows), labels=torch.randint(3, **own))

        trainer = trainer_class(
            bert(), args, train_dataset=rows, eval_dataset=rows, data_collator=collate
        )
        trainer.train()
        found.append(
            [
                log[name]
                for log in trainer.state.log_history
                for name in ("loss", "eval_loss")
                if name in log
            ]
        )

    assert found[0] == found[1] and len(found[0]) == 6


def per_token(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def test_batches_count_by_their_labels(tmp_path):
    data = language_data(16, ragged=False)
    for row in data[5:]:
        row["labels"] = torch.full_like(row["labels"], -100)
    args = config(tmp_path, per_device_eval_batch_size=4)
    whole, part = (
        DescentTrainer(llama(), args, eval_dataset=rows, layer_loss_fn=per_token).evaluate()
        for rows in (data, data[:5])
    )
    for name in ("eval_loss", "eval_layer_loss_1"):
        assert whole[name] == pytest.approx(part[name], rel=1e-6), name


def test_a_loss_of_ones_own_gets_the_items_wherever_layers_are_evaluated(tmp_path):
    def total(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    args = config(tmp_path, noise_sigma=1.0)
    trainer = DescentTrainer(bert(), args, eval_dataset=DATA_TEST, layer_loss_fn=total)
    expected = [trainer.evaluate()[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]
    np.testing.assert_allclose(trainer.evaluate_layers().losses, expected, rtol=1e-5)
    assert trainer.evaluate_robustness(gammas=[0.0]).losses[0, 0] == pytest.approx(
        expected[-1], rel=1e-5
    )


def test_a_collator_may_make_several_rows_of_an_example(tmp_path):
    def windows(rows):
        batch = default_data_collator(rows)
        return {name: torch.cat([tensor, tensor.flip(0), tensor]) for name, tensor in batch.items()}

    trainer = DescentTrainer(
        bert(), config(tmp_path), eval_dataset=DATA_TEST[:10], data_collator=windows
    )
    loss = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = bert().eval()(**windows(DATA_TEST[:10])).loss.item()
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", ["regression", "multi_label_classification"])
def test_the_metric_suits_the_task(tmp_path, task):
    generator = torch.Generator().manual_seed(0)
    shape = () if task == "regression" else (3,)
    labels = torch.rand(8, *shape, generator=generator)
    labels = labels if task == "regression" else labels.round()
    data = [dict(row, labels=label) for row, label in zip(DATA, labels)]
    model = spread(bert(num_labels=1) if task == "regression" else bert(problem_type=task))
    trainer = DescentTrainer(model, config(tmp_path, noise_sigma=1.0), eval_dataset=data)
    logits = torch.from_numpy(trainer.predict(data).predictions)
    if task == "regression":
        expected = (logits[:, 0] - labels).square().mean().sqrt().item()
    else:
        expected = ((logits > 0) == (labels == 1)).float().mean().item()

    assert trainer.evaluate_layers().values[-1] == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate_robustness(gammas=[0.0]).values[0, 0] == pytest.approx(
        expected, rel=1e-5
    )


def test_numbers_for_images_are_a_regression_before_the_model_knows(tmp_path):
    rows = [{"pixel_values": torch.rand(3, 8, 8), "labels": torch.rand(())} for _ in range(8)]
    assert (
        DescentTrainer(vit(num_labels=1), config(tmp_path), eval_dataset=rows)
        .evaluate_layers()
        .metric
        == "rmse"
    )


def test_tokens_are_no_regression_whatever_the_number_of_labels_says(tmp_path):
    trainer = DescentTrainer(llama(num_labels=1), config(tmp_path), eval_dataset=language_data(8))
    assert trainer.evaluate_layers().metric == "accuracy"


def test_hidden_states_do_not_pile_up_as_predictions(tmp_path):
    model = bert()
    model.config.output_hidden_states = True
    trainer = DescentTrainer(model, config(tmp_path), train_dataset=DATA)
    trainer.train()
    assert trainer.predict(DATA_TEST).predictions.shape == (32, 3)


def test_a_collator_of_one_s_own_gets_the_columns_that_it_needs(tmp_path):
    rows = [
        {"words": row["input_ids"].tolist(), "labels": row["labels"]}
        for row in classification_data(12)
    ]

    def collate(rows):
        ids = torch.tensor([row["words"] for row in rows])
        return {"input_ids": ids, "labels": torch.tensor([int(row["labels"]) for row in rows])}

    args = config(tmp_path, remove_unused_columns=False, eval_gammas=[0.0], noise_sigma=1.0)
    trainer = DescentTrainer(
        bert(), args, train_dataset=rows, eval_dataset=rows, data_collator=collate
    )
    loss = trainer.evaluate()["eval_loss"]

    assert trainer.evaluate_layers().losses[-1] == pytest.approx(loss, rel=1e-5)
    assert trainer.evaluate_robustness().losses[0, 0] == pytest.approx(loss, rel=1e-5)


def test_one_of_several_evaluation_sets_is_named(tmp_path):
    args = config(tmp_path, noise_sigma=1.0, eval_gammas=[0.0])
    trainer = DescentTrainer(bert(), args, eval_dataset={"a": DATA[:16], "b": DATA_TEST})
    metrics = trainer.evaluate()
    profile = trainer.evaluate_layers("a")

    assert profile.losses[-1] == pytest.approx(metrics["eval_a_loss"], rel=1e-5)
    assert profile.to_dict()["max_violation"] == pytest.approx(
        metrics["eval_a_max_violation"], abs=1e-6
    )

    for measure in (trainer.evaluate_layers, trainer.evaluate_robustness):
        with pytest.raises(ValueError, match="several evaluation sets: name one of them, 'a', 'b'"):
            measure()
        with pytest.raises(ValueError, match="is 'c'; give one of 'a', 'b'"):
            measure("c")
        with pytest.raises(ValueError, match="is a dict of x; give one dataset"):
            measure({"x": DATA})

    noisy = layer_profile(bert(), DATA[:16], gamma=2.0, sigma=1.0, batch_size=8)

    assert trainer.evaluate_layers("a", gamma=2.0).losses.tolist() == noisy.losses.tolist()

    curve = trainer.evaluate_robustness("b", gammas=[0.0])

    assert curve.losses[0, 0] == pytest.approx(metrics["eval_b_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "gammas",
    [np.linspace(0, 1, 3), torch.linspace(0, 1, 3), range(2), {0.0, 1.0}, 0.5, np.float32(0.5), 0],
)
def test_noise_levels_are_taken_as_one_number_or_several(tmp_path, gammas):
    trainer = DescentTrainer(bert(), config(tmp_path, noise_sigma=1.0), eval_dataset=DATA[:8])
    plain = np.atleast_1d(sorted(gammas) if isinstance(gammas, set) else gammas).tolist()
    assert (
        trainer.evaluate_robustness(gammas=gammas).to_dict()
        == trainer.evaluate_robustness(gammas=plain).to_dict()
    )
    for profile, level in zip(layer_profiles(bert(), DATA[:8], gammas), plain, strict=True):
        assert profile.gamma == level


@pytest.mark.parametrize(
    ("gammas", "message"),
    [(None, "set `eval_gammas`"), ([], r"`gammas` is \[\]"), ("all", "`gammas` is 'all'")],
)
def test_noise_levels_that_are_none_are_refused(tmp_path, gammas, message):
    with pytest.raises(ValueError, match=message):
        DescentTrainer(
            bert(), config(tmp_path, noise_sigma=1.0), eval_dataset=DATA
        ).evaluate_robustness(None, gammas)


@pytest.mark.parametrize("objective", ["erm", "descent"])
def test_smoothed_labels_are_those_of_the_next_tokens_also_before_training(tmp_path, objective):
    """GPT2LMHeadModel, whose class does not tell it; plain training never asks the model."""
    model = spread(gpt2(num_layers=2))
    data = language_data(8, ragged=False)
    args = config(tmp_path, objective=objective, label_smoothing_factor=0.1, noise_sigma=1.0)
    trainer = DescentTrainer(model, args, eval_dataset=data)
    measured = [
        trainer.evaluate_layers().losses[-1],
        trainer.evaluate_robustness(gammas=[0.0]).losses[0, 0],
    ]
    batch = default_data_collator(data)

    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits[
            :, :-1
        ]  # [batch, seq - 1, vocab]

    expected = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1
    )

    assert measured == pytest.approx([expected.item()] * 2, rel=1e-5)


@pytest.mark.parametrize("loss", [None, per_token])
def test_rows_without_a_label_that_counts_have_no_loss(tmp_path, loss):
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in language_data(8)]
    metrics = DescentTrainer(llama(), config(tmp_path), layer_loss_fn=loss).evaluate(data)
    assert np.isnan(metrics["eval_loss"])  # 0 would make it the best checkpoint
    assert "eval_layer_loss_1" not in metrics


def test_rows_without_labels_do_not_decide_which_labels_count_later(tmp_path):
    data = language_data(8, seed=1)
    model = spread(llama())
    rows = [{name: value for name, value in row.items() if name != "labels"} for row in data]
    args = config(tmp_path, per_device_eval_batch_size=2)
    losses = []
    for first in ([], rows):
        trainer = DescentTrainer(
            model, args, readout=lambda model, hidden, inputs: model.lm_head(hidden)
        )
        if first:
            trainer.predict(first)
        losses.append(trainer.evaluate(data)["eval_loss"])
    assert losses[0] == losses[1]


def multiplied(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"]
    return F.cross_entropy(
        logits @ torch.eye(3, dtype=logits.dtype), labels
    )  # a product that autocast would round


@pytest.mark.parametrize("loss", [None, multiplied])
def test_mixed_precision_holds_for_layers_and_levels_before_the_first_evaluation_too(
    tmp_path, loss
):
    """That of the model alone: losses and metrics are computed as `evaluate` does, on its float32 logits."""
    data = classification_data(16)
    losses = []
    args = config(tmp_path, bf16=True, noise_sigma=1.0)
    trainer = DescentTrainer(spread(bert()), args, eval_dataset=data, layer_loss_fn=loss)

    for _ in range(2):
        losses += [
            trainer.evaluate_layers().losses[-1],
            trainer.evaluate_robustness(gammas=[0.0]).losses[0, 0],
        ]
        losses.append(trainer.evaluate()["eval_loss"])

    assert losses == pytest.approx([losses[2]] * 6, rel=1e-6)
    assert losses[0] != pytest.approx(
        layer_profile(spread(bert()), data).losses[-1], rel=1e-4
    )  # single precision


@pytest.mark.parametrize("loss_only", [True, False])
def test_a_step_of_evaluation_takes_a_model_in_training_mode(tmp_path, loss_only):
    """As Trainer's does, which leaves the mode to its evaluation loop."""
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=classification_data(8))
    batch = trainer.data_collator(classification_data(8))
    losses = []
    for training in (True, False):
        trainer.model.train(training)
        losses.append(trainer.prediction_step(trainer.model, batch, loss_only)[0])
    assert torch.equal(*losses)
