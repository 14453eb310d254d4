import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from tiny.data import batches, classification_data, language_data
from tiny.devices import TEST_DEVICE
from tiny.models import bert, llama
from tiny.oracles import naive_layer_losses
from tiny.training import InOrder, config, fitted, trained
from torch._dynamo.utils import counters
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_descent import DescentConfig, DescentTrainer, layer_losses
from hf_descent.trainer import DescentMixin


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


# ---- the step itself ----


@pytest.mark.parametrize("negative_weights", ["keep", "clip"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_training_equals_a_naive_primal_dual_loop(tmp_path, negative_weights, warmup):
    alpha = 0.4
    f0 = 1.0
    eta = 0.3
    c = 0.1
    args = config(
        tmp_path, max_steps=8, descent_alpha=alpha, initial_loss_bound=f0, dual_learning_rate=eta, dual_optim="sgd",
        resilience=c, normalize_violations=False, negative_weights=negative_weights, dual_warmup_steps=warmup,
        lr_scheduler_type="constant", weight_decay=0.01,
    )  # fmt: skip
    trainer = trained(bert(), args, InOrder, train_dataset=DATA)

    model = bert()
    lam = torch.zeros(3)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in model.named_parameters() if p.ndim > 1],
                "weight_decay": 0.01,
            },
            {
                "params": [p for n, p in model.named_parameters() if p.ndim <= 1],
                "weight_decay": 0.0,
            },
        ],
        lr=1e-2,
    )

    for step, batch in enumerate(batches(DATA)):
        f = naive_layer_losses(model, batch)
        active = step >= warmup
        weights = torch.zeros(3)
        for layer in range(3):
            weights[layer] = lam[layer] - ((1 - alpha) * lam[layer + 1] if layer < 2 else 0)
        weights[2] += 1
        if negative_weights == "clip":
            weights = weights.clamp(min=0)
        objective = weights @ f if active else f[2]
        optimizer.zero_grad()
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if active:
            previous = torch.cat([torch.tensor([f0]), f.detach()[:-1]])
            violations = f.detach() - (1 - alpha) * previous
            lam = (lam + eta * (violations - c * lam)).clamp(min=0)

    torch.testing.assert_close(trainer.multipliers.values, lam, rtol=1e-3, atol=1e-5)

    assert lam.max() > 0.2

    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict(), rtol=1e-3, atol=2e-4)


def run(trainer_class, model, args, data=DATA, **given):
    """The trainer after training, the numbers that it logged and the weights."""
    trainer = trainer_class(model, args, train_dataset=data, **given)
    set_seed(7)
    trainer.train()
    kept = [
        {k: v for k, v in log.items() if "time" not in k and "second" not in k}
        for log in trainer.state.log_history
    ]
    return (
        trainer,
        kept,
        torch.cat([weight.flatten() for weight in trainer.model.state_dict().values()]),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", ["classification", "language"])
def test_erm_is_trainer_bit_for_bit_and_warm_up_takes_its_steps(tmp_path, task, smoothing):
    make = (
        (lambda: bert(dropout=0.2))
        if task == "classification"
        else (lambda: llama(attention_dropout=0.2))
    )
    data = DATA if task == "classification" else language_data()
    shared = {
        "max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-2,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "label_smoothing_factor": smoothing,
        "save_strategy": "no",
    }  # fmt: skip
    _, logs, weights = run(
        Trainer, make(), TrainingArguments(str(tmp_path), **shared), data, eval_dataset=data[:20]
    )
    erm = DescentConfig(str(tmp_path), objective="erm", descent_alpha="line", **shared)
    _, ours, our_weights = run(DescentTrainer, make(), erm, data, eval_dataset=data[:20])

    assert [
        {name: log[name] for name in stock} for log, stock in zip(ours, logs, strict=True)
    ] == logs
    assert our_weights.equal(weights) and all(
        "eval_layer_loss_1" in log for log in ours if "eval_loss" in log
    )

    if task == "language":
        return  # read in tiles, whose rounding Adam scales up
    warm_up = DescentConfig(str(tmp_path), dual_warmup_steps=6, **shared)
    trainer, _, warm_weights = run(DescentTrainer, make(), warm_up, data, eval_dataset=data[:20])
    torch.testing.assert_close(warm_weights, weights, rtol=0, atol=1e-6)

    assert trainer.multipliers.values.tolist() == [0, 0, 0]


class Reconstruct(torch.nn.Module):
    """Scores itself: on boxes in a list, as detectors take them, or on its own noisy input."""

    config = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, labels=None, **kwargs):
        target = (
            x + torch.randn_like(x)
            if labels is None
            else torch.stack([label["box"] for label in labels])
        )
        return F.mse_loss(self.linear(x), target), x


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("labelled", [True, False])
def test_erm_is_trainer_where_the_labels_are_no_tensor(tmp_path, accumulation, labelled):
    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "x": torch.rand(4, generator=generator),
            "labels": {"box": torch.rand(4, generator=generator)},
        }
        for _ in range(32)
    ]

    def collate(rows):
        batch = {"x": torch.stack([row["x"] for row in rows])}
        return {**batch, "labels": [row["labels"] for row in rows]} if labelled else batch

    args = config(
        tmp_path,
        objective="erm",
        descent_alpha=None,
        gradient_accumulation_steps=accumulation,
        remove_unused_columns=False,
    )
    found = []

    for trainer_class in (DescentTrainer, Trainer):
        given = {"eval_dataset": rows, "data_collator": collate}
        trainer, _, weights = run(trainer_class, Reconstruct(), args, rows, **given)
        found.append((weights.tolist(), trainer.evaluate().get("eval_loss")))

    assert found[0] == found[1]
    judged = dataclasses.replace(args, descent_alpha=0.3)
    with pytest.raises(ValueError, match="no tensor of labels"):
        run(DescentTrainer, Reconstruct(), judged, rows, data_collator=collate)


class Noisy(Reconstruct):
    """Draws in its forward, and ignores the items that it takes."""

    def forward(self, x, labels=None, **kwargs):
        return F.mse_loss(self.linear(x + torch.randn_like(x)), labels), x


def test_a_model_that_draws_does_not_seem_to_scale_its_loss(tmp_path):
    rows = [
        {"x": x, "labels": 10 * x}
        for x in torch.rand(16, 4, generator=torch.Generator().manual_seed(1))
    ]
    args = config(
        tmp_path,
        objective="erm",
        descent_alpha=None,
        max_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
    )
    _, logs, _ = run(DescentTrainer, Noisy(), args, rows)

    assert logs[0]["loss"] == pytest.approx(
        35, rel=0.2
    )  # the mean square of 10 x, and not four times that


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = F.cross_entropy(
            outputs.logits, inputs["labels"], weight=torch.tensor([1.0, 2.0, 3.0])
        )
        return (loss, outputs) if return_outputs else loss


class OwnTrainer(OwnLoss, Trainer):
    pass


def test_a_compute_loss_of_ones_own_trains_plainly_and_is_refused_where_layers_are_read(tmp_path):
    class Before(OwnLoss, DescentTrainer):
        pass

    class Behind(DescentMixin, OwnTrainer):
        pass

    def weights(trainer_class, objective):
        args = config(tmp_path, objective=objective, descent_alpha=None, max_steps=3)
        return run(trainer_class, bert(), args)[2]

    stock = weights(OwnTrainer, "erm")

    for trainer_class in (Before, Behind):
        assert weights(trainer_class, "erm").equal(stock)
        with pytest.raises(ValueError, match="layer_loss_fn"):
            weights(trainer_class, "descent")


class TwoLabels:
    """Two labels a row, one of which is scored; the model itself fails on them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["input_ids"], inputs["attention_mask"])
        loss = F.cross_entropy(outputs.logits, inputs["labels"][:, 0])
        return (loss, outputs) if return_outputs else loss


class Mean(Trainer):
    """A mean over each micro-batch, as the class says."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize(
    ("stock", "ours", "make", "data"),
    [
        (
            type("Stock", (TwoLabels, Trainer), {}), type("Plain", (TwoLabels, DescentTrainer), {}), bert,
            [{**row, "labels": torch.tensor([row["labels"], 1])} for row in DATA],
        ),
        (Mean, type("MeanDescent", (DescentMixin, Mean), {}), llama, language_data(64)),
    ],
    ids=["labels that the model does not take", "the scale that its class tells"],
)  # fmt: skip
def test_plain_training_goes_by_a_compute_loss_of_ones_own(tmp_path, stock, ours, make, data):
    args = config(
        tmp_path, objective="erm", descent_alpha=None, max_steps=2, gradient_accumulation_steps=4
    )
    (_, expected, _), (_, logs, _) = (
        run(trainer_class, make(), args, data) for trainer_class in (stock, ours)
    )
    assert logs == expected and "grad_norm" in logs[1]


@pytest.mark.skipif(
    not is_torch_greater_or_equal("2.12"), reason="torch has no gradient of their loss"
)
def test_whole_labels_of_a_single_logit_train_as_numbers(tmp_path):
    """The model takes them for numbers; what their loss is without it is not known in closed form."""
    rows = [{**row, "labels": index % 5} for index, row in enumerate(DATA)]
    args = config(
        tmp_path,
        max_steps=4,
        objective="fixed",
        fixed_multipliers=[0.0] * 3,
        initial_loss_bound=5.0,
    )
    ours, stock = (
        trainer_class(bert(num_labels=1), args, train_dataset=rows).train().training_loss
        for trainer_class in (DescentTrainer, Trainer)
    )

    assert ours == pytest.approx(stock, rel=1e-5)

    auto = config(tmp_path, initial_loss_bound="auto", descent_alpha="auto", dual_warmup_steps=2)
    trainer = DescentTrainer(bert(num_labels=1), auto, train_dataset=rows)

    with pytest.raises(ValueError, match="whole labels of a single logit.*give them as floats"):
        trainer.train()


def test_plain_training_arguments_get_the_package_defaults(tmp_path):
    args = TrainingArguments(
        str(tmp_path), max_steps=20, report_to="none", use_cpu=True, disable_tqdm=True
    )
    trainer = DescentTrainer(bert(), args, train_dataset=DATA)
    assert isinstance(trainer.args, DescentConfig) and trainer.args.max_steps == 20
    trainer.train()
    assert trainer.problem is not None and trainer.multipliers.values.shape == (3,)


def kinds(trainer):
    return [type(callback) for callback in trainer.callback_handler.callbacks]


def test_the_progress_bar_leaves_single_layers_out_and_ones_own_stays(tmp_path, capsys):
    class Own(ProgressCallback):
        pass

    args = config(tmp_path, disable_tqdm=False, exit_targets={1: 0.1}, loss_targets={2: 0.5})
    trainer = DescentTrainer(bert(), args, train_dataset=DATA)

    assert not {ProgressCallback, PrinterCallback} & {*kinds(trainer)}

    trainer.train()

    assert "violation_bound_2" in trainer.state.log_history[0]

    printed = "".join(capsys.readouterr())

    assert "max_violation" in printed and not re.search("layer_loss_1|exit_1|bound_2", printed)

    own = kinds(DescentTrainer(bert(), config(tmp_path, disable_tqdm=False), callbacks=[Own]))

    assert own.count(Own) == 1 and ProgressCallback not in own

    args = config(tmp_path, objective="erm", disable_tqdm=False)

    assert kinds(DescentTrainer(bert(), args)) == kinds(Trainer(bert(), args))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [(bert, DATA), (llama, language_data())])
def test_compiled_layers_train_as_plain_ones_and_resume(tmp_path, monkeypatch, model, data):
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "dual_learning_rate": 0.1,
    }

    def trained(folder, resume=None):
        return fitted(
            InOrder(model(), config(tmp_path / folder, **settings), train_dataset=data), resume
        )

    plain = trained("plain")
    torch._dynamo.reset()
    counters.clear()
    backend = "inductor" if TEST_DEVICE == "cuda" else "aot_eager"
    if model is llama:  # as accelerate's config does
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend.upper())
    else:
        settings["torch_compile_backend"] = backend
    compiled = trained("compiled")

    assert counters["frames"]["ok"] > 0

    torch.testing.assert_close(
        compiled.model.state_dict(), plain.model.state_dict(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(compiled.multipliers.values, plain.multipliers.values)
    resumed = trained("compiled", str(tmp_path / "compiled" / "checkpoint-2"))
    torch.testing.assert_close(
        resumed.model.state_dict(), compiled.model.state_dict(), rtol=0, atol=0
    )


# ---- faults ----


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"torch_compile": True, "gradient_checkpointing": True}, "torch_compile"),
        ({"descent_alpha": [0.1, 0.2]}, "2 values but the model has 3 layers"),
        ({"objective": "fixed", "fixed_multipliers": [0.1]}, "1 values; give one per constraint"),
        ({"objective": "fixed", "fixed_multipliers": [0.1, -0.1, 0.0]}, "finite and not negative"),
        ({"objective": "fixed", "fixed_multipliers": "nowhere"}, "nowhere"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_first_step(tmp_path, arguments, match):
    with pytest.raises(ValueError, match=match):
        DescentTrainer(bert(), config(tmp_path, **arguments), train_dataset=DATA).train()
    assert not (tmp_path / "checkpoint-1").exists()


def test_what_another_trainer_or_launcher_does_is_refused(tmp_path):
    args = config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel"):
        DescentTrainer(bert(), args, train_dataset=DATA)


def test_a_batch_without_labels_is_refused(tmp_path):
    data = [{name: value for name, value in row.items() if name != "labels"} for row in DATA]
    with pytest.raises(ValueError, match="no tensor of labels"):
        DescentTrainer(bert(), config(tmp_path), train_dataset=data).train()


def test_a_head_is_trained_on_a_frozen_model(tmp_path):
    """Linear probing: the last layer's hidden state has no gradient, and its readout has one."""
    model = bert()
    model.bert.requires_grad_(False)
    before = model.classifier.weight.clone()

    def readout(model, hidden, inputs):
        return model.classifier(hidden[:, 0])

    args = config(tmp_path, objective="erm", max_steps=2)
    DescentTrainer(model, args, train_dataset=classification_data(16), readout=readout).train()
    assert not torch.equal(model.classifier.weight, before)


def test_a_step_by_itself_is_refused_before_a_batch_has_shown_the_layers(tmp_path):
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=DATA)
    batch = next(batches(DATA))
    with pytest.raises(ValueError, match="The layers are not known yet"):
        trainer.training_step(trainer.model, batch)


class Interrupted(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_after_an_interrupted_training_an_evaluation_reads_all_tokens(tmp_path):
    rows = language_data(32, ragged=False)
    args = config(tmp_path, readout_token_fraction=0.2)
    trainer = DescentTrainer(
        llama(), args, train_dataset=rows, eval_dataset=rows, callbacks=[Interrupted()]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    metrics = trainer.evaluate()
    with torch.no_grad():  # by replay, which knows of no sample
        expected = layer_losses(trainer.model.eval(), next(batches(rows, 32)))
    found = [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]
    assert found == pytest.approx(expected.tolist(), rel=1e-5)
