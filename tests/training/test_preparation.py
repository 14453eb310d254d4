"""What training finds out on its first batch, above all whether f_0 = "auto" can be measured for the loss at hand."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny.data import Stream, batches, classification_data, language_data
from tiny.models import VOCAB, bert, llama, spread
from tiny.tokenizers import word_tokenizer
from tiny.training import InOrder, config, fitted
from torch.utils.data import DataLoader
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithPadding,
    XLNetConfig,
    XLNetForQuestionAnsweringSimple,
    default_data_collator,
)
from transformers.utils import ModelOutput

from hf_descent import DescentTrainer
from hf_descent.early_exit import truncate
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.noise.embedding_noise import estimate_sigma


AUTO = {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 4}


def make(folder, model, data, loss=None, readout=None, **settings):
    args = config(folder, **{"max_steps": 8, "save_strategy": "no", **AUTO, **settings})
    return DescentTrainer(
        model, args, train_dataset=data, eval_dataset=data, layer_loss_fn=loss, readout=readout
    )


def trained(*given, **settings):
    return fitted(make(*given, **settings))


class Weighted(BertForSequenceClassification):
    """Scores by a loss of its own."""

    factor = 50
    weight = None

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        if labels is not None:
            outputs["loss"] = self.factor * F.cross_entropy(
                outputs.logits, labels, weight=self.weight
            )
        return outputs


class WeightedByClass(Weighted):
    """For a fresh model, whose logits are all alike, hardly another loss than the cross-entropy."""

    factor = 1
    weight = torch.tensor([1.0, 1.0, 3.0])


def test_a_model_that_was_cut_adapted_or_whose_folder_is_gone_is_evaluated_without_the_problem_of_its_training(
    tmp_path,
):
    peft = pytest.importorskip("peft")
    settings = {"dual_warmup_steps": 1, "max_steps": 4, "descent_alpha": 0.3}
    trainer = trained(tmp_path / "run", bert(), classification_data(8), **settings)
    trainer.save_model()
    whole, cut, other, gone = (
        BertForSequenceClassification.from_pretrained(tmp_path / "run") for _ in range(4)
    )
    adapted = peft.get_peft_model(
        other, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    )

    for model, known in ((whole, True), (truncate(cut, 2), False), (adapted, False), (gone, False)):
        if model is gone:
            shutil.rmtree(tmp_path / "run")
        evaluating = make(tmp_path / "evaluation", model, classification_data(8))
        assert "eval_layer_loss_2" in evaluating.evaluate()
        assert (evaluating.problem.state_dict() == trainer.problem.state_dict()) == known


def test_a_model_of_targets_alone_is_judged_by_them_in_a_trainer_with_default_arguments(tmp_path):
    """The default has a multiplier for each layer, and a problem of targets one for each target."""
    settings = {"descent_alpha": None, "exit_targets": {1: 0.1}, "max_steps": 4}
    trainer = trained(tmp_path / "run", bert(), classification_data(8), **settings)
    trainer.save_model()
    model = BertForSequenceClassification.from_pretrained(tmp_path / "run")

    evaluating = make(tmp_path / "evaluation", model, classification_data(8))
    assert "eval_layer_loss_2" in evaluating.evaluate()
    assert evaluating.problem.state_dict() == trainer.problem.state_dict()
    verdict = evaluating.evaluate_layers().certificate()
    assert verdict.rows == ["exit_1"]
    assert verdict.multipliers == trainer.evaluate_layers().certificate().multipliers


def test_a_model_that_is_evaluated_is_held_against_the_rows_that_are_given_now(tmp_path):
    trainer = trained(
        tmp_path / "run", bert(), classification_data(8), max_steps=4, dual_warmup_steps=1
    )
    trainer.save_model()
    model = BertForSequenceClassification.from_pretrained(tmp_path / "run")
    auto = {"descent_alpha": None, "initial_loss_bound": "auto"}
    for given in ({"exit_targets": {1: 0.1}}, {"descent_strength": 0.9}):
        evaluating = make(tmp_path / "evaluation", model, classification_data(8), **auto | given)
        evaluating.evaluate()
        assert {name: getattr(evaluating.problem, name) for name in given} == given
        assert evaluating.problem.chance_loss == trainer.problem.chance_loss


def test_a_model_whose_layers_the_rows_leave_alone_is_measured_without_a_problem(tmp_path):
    data = classification_data(16)
    single = make(tmp_path, bert(num_layers=1), data)
    assert single.evaluate()["eval_feasible"] == 0 and single.problem is None
    with pytest.raises(ValueError, match="No layer has a constraint"):
        single.train()
    last = trained(tmp_path, bert(), data, objective="deep_supervision", constrained_layers=[3])
    assert last.evaluate()["eval_feasible"] == 0


def test_a_penalty_in_the_loss_is_no_loss_of_the_layers(tmp_path):
    peft = pytest.importorskip("peft")
    for weight in (0.5, 0.0):
        adapter = peft.AdaLoraConfig(
            task_type="SEQ_CLS", target_modules=["query"], total_step=8, orth_reg_weight=weight
        )
        model = peft.get_peft_model(bert(), adapter)
        if weight:
            with pytest.raises(ValueError, match="set `orth_reg_weight=0`"):
                make(tmp_path, model, classification_data(40))
    make(tmp_path, model, classification_data(40), max_steps=5).train()


def regression_rows(count=40):
    return [{**row, "labels": float(row["labels"])} for row in classification_data(count)]


def multi_label_rows(count=40):
    return [{**row, "labels": torch.eye(3)[row["labels"]]} for row in classification_data(count)]


def cross_entropy(outputs, labels, num_items_in_batch=None, weight=None):
    return F.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), weight=weight)


def rare_rows(count, shape=()):
    """Of which a first batch has one class."""
    rows = enumerate(classification_data(count))
    return [{**row, "labels": torch.full(shape, 2 * (index == count // 2))} for index, row in rows]


def absolute(outputs, labels, num_items_in_batch=None):
    return (outputs["logits"].squeeze(-1) - labels).abs().mean()


def huber(outputs, labels, num_items_in_batch=None):
    return F.huber_loss(outputs["logits"].squeeze(-1), labels)


def weighted_numbers(outputs, labels, num_items_in_batch=None):
    return ((outputs["logits"] - labels).square() * torch.tensor([1.0, 1.0, 25.0])).mean()


def weighted_if_positive(outputs, labels, num_items_in_batch=None):
    weight = torch.tensor([1.0, 1.0, 19.0])  # of a class that no row here has
    return F.binary_cross_entropy_with_logits(outputs["logits"], labels, pos_weight=weight)


def small_numbers(count):
    return [
        {**row, "labels": 0.1 * (index % 2)} for index, row in enumerate(classification_data(count))
    ]


weighted = partial(cross_entropy, weight=WeightedByClass.weight)
weighted_first = partial(cross_entropy, weight=1 + torch.eye(10)[0])


def weighted_sum(outputs, labels, num_items_in_batch=None):
    losses = F.cross_entropy(
        outputs["logits"], labels, weight=WeightedByClass.weight, reduction="sum"
    )
    return losses / (num_items_in_batch or len(labels))


def focal(outputs, labels, num_items_in_batch=None):
    losses = F.cross_entropy(outputs["logits"], labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def least_weighted_loss(labels, weights, divides):
    """The least loss of a constant prediction, found by descent on its logits."""
    logits = torch.zeros(len(weights), requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200)

    def loss():
        losses = weights[labels] * F.cross_entropy(
            logits.expand(len(labels), -1), labels, reduction="none"
        )
        return losses.sum() / (weights[labels].sum() if divides else len(labels))

    def closure():
        optimizer.zero_grad()
        loss().backward()
        return loss()

    optimizer.step(closure)
    return loss().item()


WEIGHTED = {
    "a factor in the model": (
        lambda: Weighted(bert().config), classification_data, None, torch.full((3,), 50.0), False,
    ),
    "in the model": (
        lambda: WeightedByClass(bert().config), classification_data, None, WeightedByClass.weight, True,
    ),
    "a rare class": (
        lambda: WeightedByClass(bert().config), rare_rows, None, WeightedByClass.weight, True,
    ),
    "mean": (bert, classification_data, weighted, WeightedByClass.weight, True),
    "sum": (bert, classification_data, weighted_sum, WeightedByClass.weight, False),
    "of ten": (
        lambda: bert(num_labels=10), classification_data, weighted_first, 1 + torch.eye(10)[0], True,
    ),
    "tokens": (
        lambda: BertForTokenClassification(bert().config), partial(rare_rows, shape=(10,)), weighted,
        WeightedByClass.weight, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "loss", "weights", "divides"), WEIGHTED.values(), ids=WEIGHTED
)
def test_the_loss_at_chance_counts_the_weights_of_classes_and_rows_are_split_by_them(
    tmp_path, model, data, loss, weights, divides
):
    rows = data(64)
    labels = torch.cat([torch.as_tensor(row["labels"]).flatten() for row in rows])
    trainer = trained(tmp_path, model(), rows, loss, max_steps=1)
    expected = least_weighted_loss(labels, weights, divides)

    assert trainer.problem.chance_loss == pytest.approx(expected, rel=2e-3)

    profile = trainer.evaluate_layers(rows)

    assert profile.chance == pytest.approx(expected, rel=2e-3)
    assert profile.whole_batches == 0 and len(profile.row_sums) == 64

    if len(labels) > 64:  # of tokens
        return
    batch = default_data_collator(rows)

    with torch.no_grad():
        logits = trainer.model.eval()(**{**batch, "labels": None}).logits

    losses = weights[labels] * F.cross_entropy(logits, labels, reduction="none")
    shares = losses / (weights[labels].sum() if divides else 64)
    # Weights are known but for a factor where they divide.
    found = torch.from_numpy(profile.row_sums[:, -2] / profile.row_sums[:, -1].sum()).float()
    torch.testing.assert_close(found, shares, rtol=2e-3, atol=1e-5)

    assert profile.losses[-1] == pytest.approx(shares.sum().item(), rel=2e-3)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(shares.sum().item(), rel=2e-3)


UNMEASURED = {
    "focal": (bert, classification_data, focal),
    "no square": (lambda: bert(num_labels=1), regression_rows, absolute),
    "no square far off": (lambda: bert(num_labels=1), small_numbers, huber),
    "weights of labels that are 1": (
        lambda: bert(problem_type="multi_label_classification"), multi_label_rows, weighted_if_positive,
    ),
    "weights of numbers": (lambda: bert(problem_type="regression"), multi_label_rows, weighted_numbers),
}  # fmt: skip


@pytest.mark.parametrize(("model", "data", "loss"), UNMEASURED.values(), ids=UNMEASURED)
def test_a_loss_whose_f_0_cannot_be_measured_is_refused_before_the_first_step(
    tmp_path, model, data, loss
):
    trainer = make(tmp_path, model(), data(40), loss)
    with pytest.raises(
        ValueError, match="initial_loss_bound='auto'.*set it to the loss of a constant prediction"
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    for settings in ({"initial_loss_bound": 60.0}, {"objective": "deep_supervision"}):
        assert trained(tmp_path, model(), data(40), loss, **settings).state.global_step == 8


def test_a_shifted_loss_of_ones_own_gets_the_f_0_of_the_model_s(tmp_path):
    def shifted(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        return F.cross_entropy(logits, labels, reduction="sum") / (
            num_items_in_batch or labels.ne(-100).sum()
        )

    data = language_data(200)
    trainers = [
        trained(tmp_path, llama(), data, loss, per_device_train_batch_size=16)
        for loss in (shifted, None)
    ]
    bounds = [trainer.problem.initial_loss_bound for trainer in trainers]

    assert bounds[0] == pytest.approx(bounds[1], rel=0.01)


@pytest.mark.parametrize(("loss", "rare"), [(None, 0.2), (cross_entropy, 0.125)])
def test_f_0_counts_the_label_smoothing_of_trainer_s_loss_alone(tmp_path, loss, rare):
    data = [
        {**row, "labels": int(index % 8 == 0)} for index, row in enumerate(classification_data(64))
    ]
    settings = {"label_smoothing_factor": 0.2, "per_device_train_batch_size": 16}
    trainer = trained(tmp_path, spread(bert(num_labels=2)), data, loss, **settings)
    entropy = -rare * math.log(rare) - (1 - rare) * math.log(1 - rare)
    assert trainer.problem.initial_loss_bound == pytest.approx(entropy, abs=1 / 64)


def test_a_mean_over_numbers_is_scaled_by_trainer_s_count_of_them(tmp_path):
    """A loss that divides by the items is the mean over all numbers of the batch, however it is accumulated."""
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        if len(labels) == 4 and torch.is_grad_enabled():  # a training step, no trial of the loss
            seen.append(float(num_items_in_batch))
        return (outputs["logits"] - labels).square().sum() / num_items_in_batch

    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "initial_loss_bound": 1.0,
    }
    model = bert(problem_type="multi_label_classification")
    data = multi_label_rows()
    trainer = trained(tmp_path, model, data, loss, **settings)

    assert seen and set(seen) == {2 * 4 * 3}

    batch = default_data_collator(data)
    expected = F.mse_loss(model.eval()(**batch).logits, batch["labels"]).item()

    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_plain_training_with_a_readout_measures_nothing(tmp_path):
    def readout(model, hidden, inputs):
        return model.classifier(hidden[:, 0])

    data = [
        {**row, "labels": torch.tensor(1)} for row in classification_data(40)
    ]  # no f_0: all are alike
    metrics = trained(
        tmp_path, bert(), data, readout=readout, objective="erm", dual_warmup_steps=0
    ).evaluate()

    assert (
        "eval_layer_loss_1" in metrics
        and metrics["eval_feasible"] == 0
        and "eval_max_violation" not in metrics
    )


def test_f_0_of_a_language_model_leaves_out_the_token_that_nothing_predicts(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 7, (400, 3), generator=generator)
    rows[:, 0] = 4  # where every text begins
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = trained(tmp_path, llama(), data, per_device_train_batch_size=100)
    assert trainer.problem.initial_loss_bound == pytest.approx(math.log(2), rel=2e-3)


class Shifted(torch.nn.Module):
    """A causal language model of one's own."""

    def __init__(self, as_tuple):
        super().__init__()
        self.model = llama()
        self.as_tuple = as_tuple

    def forward(self, input_ids, attention_mask=None, labels=None):
        outputs = {"logits": self.model(input_ids, attention_mask).logits}
        if labels is not None:
            loss = F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            outputs = {"loss": loss, **outputs}
        return tuple(outputs.values()) if self.as_tuple else outputs


def test_outputs_may_be_a_tuple(tmp_path):
    cut = {
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": 2,
        "initial_loss_bound": "auto",
    }
    runs = [
        trained(tmp_path, Shifted(as_tuple), language_data(), **cut, dual_warmup_steps=2)
        for as_tuple in (0, 1)
    ]
    names = [f"{kind}_{layer}" for kind in ("layer_loss", "multiplier") for layer in (1, 2, 3)]
    named, by_place = (
        [log[name] for log in run.state.log_history for name in names if name in log]
        for run in runs
    )

    assert named and by_place == pytest.approx(named, rel=1e-5, abs=1e-6)
    assert runs[0].problem.initial_loss_bound == runs[1].problem.initial_loss_bound


class Renamed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = bert(num_labels=1)
        self.config = self.model.config

    def forward(self, input_ids, attention_mask, target=None):
        logits = self.model(input_ids, attention_mask).logits
        loss = None if target is None else 3 * F.mse_loss(logits.squeeze(-1), target)
        return ModelOutput(loss=loss, logits=logits)


def test_numbers_may_be_labels_under_another_name(tmp_path):
    data = [{**row, "target": row.pop("labels")} for row in regression_rows()]
    trainer = trained(tmp_path, Renamed(), data, label_names=["target"])
    targets = torch.tensor([float(row["target"]) for row in data])
    assert trainer.problem.initial_loss_bound == pytest.approx(3 * targets.var().item(), rel=0.3)


def test_f_0_of_answers_counts_those_of_texts_longer_than_the_first_batch(tmp_path):
    config_ = XLNetConfig(
        vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=16
    )  # states no limit
    # The first batch is short. Models take -1 for the first token, and leave out what lies past the end.
    ends = [index % 34 or -1 for index in range(340)] + [99] * 60
    rows = [
        {
            "input_ids": torch.arange(40 if end > 5 else 6),
            "start_positions": end,
            "end_positions": end,
        }
        for end in ends
    ]
    args = config(tmp_path, **AUTO, per_device_train_batch_size=6, max_steps=5)
    pad = DataCollatorWithPadding(word_tokenizer())
    trainer = fitted(
        InOrder(
            XLNetForQuestionAnsweringSimple(config_), args, train_dataset=rows, data_collator=pad
        )
    )

    assert trainer.problem.initial_loss_bound == pytest.approx(math.log(34), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_f_0_of_numbers_heeds_what_half_precision_makes_of_them(tmp_path, dtype):
    numbers = 3 + torch.randn(40, generator=torch.Generator().manual_seed(0))
    rows = [
        {**row, "labels": number.to(dtype)} for row, number in zip(classification_data(40), numbers)
    ]
    trainer = trained(tmp_path, bert(num_labels=1).to(dtype), rows)
    assert trainer.problem.initial_loss_bound == pytest.approx(
        numbers.var(correction=0).item(), rel=0.3
    )


def test_a_given_f_0_needs_no_chance_to_be_compared_with(tmp_path):
    data = [
        {**row, "labels": torch.tensor(1)} for row in classification_data(40)
    ]  # no best constant prediction
    assert trained(tmp_path, bert(), data, initial_loss_bound=1.1).problem.initial_loss_bound == 1.1


def test_a_saved_model_is_judged_by_the_problem_it_was_trained_on(tmp_path):
    data = classification_data(40)
    trainer = trained(tmp_path, bert(), data, descent_alpha=0.3, initial_loss_bound=1.0)
    expected = trainer.evaluate()
    trainer.save_model(tmp_path / "saved")
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    metrics = make(tmp_path, saved, data).evaluate()

    for name in ("eval_max_violation", "eval_feasible", "eval_feasible_score"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name

    other = make(tmp_path, bert(), data)

    assert (
        other.evaluate()["eval_feasible"] == 0 and other.problem.alpha == "line"
    )  # nothing is known of this one

    again = trained(tmp_path / "again", saved, data)

    assert again.problem.initial_loss_bound != 1.0  # measured afresh


def test_the_loss_of_a_half_precision_model_is_called_blurred(tmp_path, caplog):
    batch = default_data_collator(classification_data(4))
    make(tmp_path, bert().bfloat16(), classification_data(40), initial_loss_bound=1.0).train()
    assert caplog.text.count("torch.bfloat16") == 1 and "mixed precision" in caplog.text
    assert bert().bfloat16()(**batch).loss.dtype == torch.bfloat16


def test_a_readout_with_parameters_of_its_own_can_be_evaluated_but_not_trained(tmp_path):
    head = torch.nn.Linear(16, 3)
    data = classification_data(8)
    trainer = make(
        tmp_path, bert(), data, readout=lambda model, hidden, inputs: head(hidden.mean(1))
    )
    assert "eval_layer_loss_1" in trainer.evaluate()
    with pytest.raises(
        ValueError, match="`readout` has parameters that BertForSequenceClassification does not"
    ):
        trainer.train()


# ---- the deviation of the clean signal ----


DATA = classification_data()


class OwnLoader(DescentTrainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(
            DataLoader(DATA, batch_size=8, collate_fn=default_data_collator)
        )


def test_the_deviation_is_not_measured_on_data_that_can_be_read_once(tmp_path):
    for trainer_class, data in ((DescentTrainer, Stream(iter(DATA))), (OwnLoader, None)):
        with pytest.raises(ValueError, match="Set `noise_sigma`"):
            trainer_class(bert(), config(tmp_path, noise_gamma=0.5), train_dataset=data).train()
        given = config(tmp_path, noise_gamma=0.5, noise_sigma=0.02, max_steps=8)
        data = data and Stream(iter(DATA))
        assert (
            fitted(trainer_class(bert(), given, train_dataset=data)).state.global_step == 8
        )  # all of the data


def test_the_deviation_is_measured_on_a_stream_that_starts_afresh(tmp_path):
    args = config(tmp_path, noise_gamma=0.5)
    models = [
        fitted(DescentTrainer(bert(), args, train_dataset=data)).model
        for data in (DATA, Stream(DATA))
    ]
    assert models[0].config.noise_sigma == models[1].config.noise_sigma > 0


@pytest.mark.parametrize("batch_size", [2, 48, 3000])
def test_the_deviation_depends_neither_on_the_batches_nor_on_the_order(tmp_path, batch_size):
    values = torch.linspace(0, 1, 4000)
    model = UTForVideoDenoising(UTConfig(hidden_size=16, num_hidden_layers=2))
    rows = [
        {"pixel_values": value.expand(2, 16), "labels": value.expand(2, 16)} for value in values
    ]
    given = {"per_device_eval_batch_size": batch_size, "dataloader_drop_last": True}
    found = make(tmp_path, model, rows, noise_gamma=0.5, **given).noise_sigma()
    assert found == pytest.approx(values.std().item(), rel=1e-3)


def test_a_deviation_that_is_given_comes_before_the_model_s(tmp_path):
    model = bert(noise_sigma=3.0)
    assert [
        make(tmp_path, model, DATA, noise_sigma=given).noise_sigma() for given in (None, 0.5)
    ] == [3.0, 0.5]


def test_every_micro_batch_of_every_step_has_noise_of_its_own(tmp_path):
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs["logits"], labels)
        if torch.is_grad_enabled():  # a training step, no trial of the loss
            seen.append(loss.item())
        return loss

    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.0,
    }
    make(
        tmp_path,
        bert(),
        DATA[:1] * 16,
        loss,
        objective="erm",
        max_steps=2,
        noise_gamma=1.0,
        **settings,
    ).train()

    assert len({*seen}) == len(seen) == 4


def test_training_without_noise_measures_the_deviation_for_the_tests_under_noise(tmp_path):
    """On the embeddings before training, as a run with noise does, and without a trace in the training itself."""
    weights = []
    sigmas = []
    for settings in ({"eval_gammas": [0.0, 1.0]}, {"noise_gamma": 0.5}, {}):
        model = bert(dropout=0.1)
        args = config(tmp_path, objective="erm", learning_rate=0.3, **settings)
        fitted(DescentTrainer(model, args, train_dataset=DATA, eval_dataset=DATA)).save_model()
        sigmas.append(json.loads((tmp_path / "config.json").read_text()).get("noise_sigma"))
        weights.append(model.classifier.weight)
    expected = estimate_sigma(bert(), batches(DATA))
    assert sigmas == [pytest.approx(expected), pytest.approx(expected), None]
    assert estimate_sigma(model, batches(DATA)) > 1.1 * expected
    assert weights[0].equal(weights[2])
