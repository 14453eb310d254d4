import copy
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import bert, classification_data, config, language_data, llama
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.trainer import DescentMixin


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


class InOrder(DescentTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def truncated(model, layers):
    """An oracle that shares no code with the readout: the model with its upper layers cut off."""
    model = copy.deepcopy(model)
    model.base_model.encoder.layer = model.base_model.encoder.layer[:layers]
    return model


def naive_layer_losses(model, batch):
    """BERT's layer losses by its hidden states, pooler and classifier."""
    hidden_states = model.bert(batch["input_ids"], batch["attention_mask"], output_hidden_states=True).hidden_states
    logits = [model.classifier(model.bert.pooler(hidden)) for hidden in hidden_states[1:]]
    return torch.stack([F.cross_entropy(logit, batch["labels"]) for logit in logits])  # [layers]


def batches(data, size=8):
    for start in range(0, len(data), size):
        rows = data[start : start + size]
        yield {
            "input_ids": torch.stack([row["input_ids"] for row in rows]),
            "attention_mask": torch.stack([row["attention_mask"] for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


# ---- the step itself ----


@pytest.mark.parametrize("negative_weights", ["keep", "clip"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_training_equals_a_naive_primal_dual_loop(tmp_path, negative_weights, warmup):
    alpha, f0, eta, c = 0.4, 1.0, 0.3, 0.1
    args = config(
        tmp_path, max_steps=8, descent_alpha=alpha, initial_loss_bound=f0, dual_learning_rate=eta, dual_optim="sgd",
        resilience=c, normalize_violations=False, negative_weights=negative_weights, dual_warmup_steps=warmup,
        lr_scheduler_type="constant", weight_decay=0.01,
    )  # fmt: skip
    trainer = InOrder(bert(), args, train_dataset=DATA)
    trainer.train()

    model, lam = bert(), torch.zeros(3)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for n, p in model.named_parameters() if p.ndim <= 1], "weight_decay": 0.0},
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
    for (name, a), b in zip(trainer.model.named_parameters(), model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", ["classification", "language"])
def test_erm_is_trainer_bit_for_bit(tmp_path, task, smoothing):
    make = (lambda: bert(dropout=0.2)) if task == "classification" else (lambda: llama(attention_dropout=0.2))
    data = DATA if task == "classification" else language_data()
    shared = {
        "max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-2,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "label_smoothing_factor": smoothing,
        "save_strategy": "no",
    }  # fmt: skip
    stock = Trainer(make(), TrainingArguments(str(tmp_path), **shared), train_dataset=data, eval_dataset=data[:20])
    ours = DescentTrainer(
        make(), DescentConfig(str(tmp_path), objective="erm", **shared), train_dataset=data, eval_dataset=data[:20]
    )
    for trainer in (stock, ours):
        set_seed(7)
        trainer.train()
    for (name, a), b in zip(stock.model.state_dict().items(), ours.model.state_dict().values()):
        assert torch.equal(a, b), name
    for a, b in zip(stock.state.log_history, ours.state.log_history, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k and "second" not in k} == {
            k: v for k, v in b.items() if "time" not in k and "second" not in k
        }


class Reconstruct(torch.nn.Module):
    """Scores itself: on boxes in a list, as detectors take them, or on its own noisy input."""

    config = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, labels=None, **kwargs):
        target = x + torch.randn_like(x) if labels is None else torch.stack([label["box"] for label in labels])
        return F.mse_loss(self.linear(x), target), x


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("labelled", [True, False])
def test_erm_is_trainer_where_the_labels_are_no_tensor(tmp_path, accumulation, labelled):
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"x": torch.rand(4, generator=generator), "labels": {"box": torch.rand(4, generator=generator)}}
        for _ in range(32)
    ]

    def collate(rows):
        batch = {"x": torch.stack([row["x"] for row in rows])}
        return {**batch, "labels": [row["labels"] for row in rows]} if labelled else batch

    def run(trainer_class):
        args = config(tmp_path, objective="erm", gradient_accumulation_steps=accumulation, remove_unused_columns=False)
        trainer = trainer_class(Reconstruct(), args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
        trainer.train()
        return trainer.model.linear.weight, trainer.evaluate().get("eval_loss")

    (weight, loss), (stock_weight, stock_loss) = run(DescentTrainer), run(Trainer)
    assert weight.equal(stock_weight) and loss == stock_loss


class Noisy(torch.nn.Module):
    """Draws in its forward, and ignores the items that it takes."""

    config = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, labels=None, **kwargs):
        return F.mse_loss(self.linear(x + torch.randn_like(x)), labels), x


def test_a_model_that_draws_does_not_seem_to_scale_its_loss(tmp_path):
    rows = [{"x": x, "labels": 10 * x} for x in torch.rand(16, 4, generator=torch.Generator().manual_seed(1))]
    args = config(tmp_path, objective="erm", max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer = DescentTrainer(Noisy(), args, train_dataset=rows)
    trainer.train()
    whole = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    assert whole == pytest.approx(35, rel=0.2)  # the mean square of 10 x, and not four times that


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = F.cross_entropy(outputs.logits, inputs["labels"], weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class OwnTrainer(OwnLoss, Trainer):
    pass


def test_a_compute_loss_of_ones_own_trains_plainly_and_is_refused_where_layers_are_read(tmp_path):
    class Before(OwnLoss, DescentTrainer):
        pass

    class Behind(DescentMixin, OwnTrainer):
        pass

    def train(trainer_class, objective):
        trainer = trainer_class(bert(), config(tmp_path, objective=objective, max_steps=3), train_dataset=DATA)
        trainer.train()
        return torch.cat([parameter.flatten() for parameter in trainer.model.parameters()])

    stock = train(OwnTrainer, "erm")
    for trainer_class in (Before, Behind):
        assert train(trainer_class, "erm").equal(stock)
        with pytest.raises(ValueError, match="layer_loss_fn"):
            train(trainer_class, "descent")


def test_plain_training_arguments_get_the_package_defaults(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=20, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = DescentTrainer(bert(), args, train_dataset=DATA)
    assert isinstance(trainer.args, DescentConfig) and trainer.args.max_steps == 20
    trainer.train()
    assert trainer.problem is not None and trainer.multipliers.values.shape == (3,)


def test_warm_up_trains_as_trainer_does(tmp_path):
    shared = {"max_steps": 5, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    stock = Trainer(bert(dropout=0.2), TrainingArguments(str(tmp_path), **shared), train_dataset=DATA)
    ours = DescentTrainer(
        bert(dropout=0.2), DescentConfig(str(tmp_path), dual_warmup_steps=5, **shared), train_dataset=DATA
    )
    for trainer in (stock, ours):
        set_seed(7)
        trainer.train()
    for (name, a), b in zip(stock.model.named_parameters(), ours.model.named_parameters()):
        torch.testing.assert_close(a, b[1], rtol=0, atol=1e-6, msg=name)
    assert ours.multipliers.values.tolist() == [0, 0, 0]


def test_fractional_warm_up_counts_all_steps(tmp_path):
    trainer = DescentTrainer(bert(), config(tmp_path, max_steps=10, dual_warmup_steps=0.35), train_dataset=DATA)
    trainer.train()
    first = next(log["step"] for log in trainer.state.log_history if log.get("multiplier_1", 0) > 0)
    assert first == 5  # ceil(3.5) = 4 inactive steps


def test_fixed_multipliers_of_a_run_weigh_the_losses_of_another(tmp_path):
    constrained = InOrder(bert(), config(tmp_path / "constrained", dual_learning_rate=0.3), train_dataset=DATA)
    constrained.train()
    constrained.save_model()
    fixed = InOrder(
        bert(),
        config(tmp_path / "fixed", objective="fixed", fixed_multipliers=str(tmp_path / "constrained")),
        train_dataset=DATA,
    )
    fixed.train()
    assert torch.equal(fixed.multipliers.values, constrained.multipliers.values)
    weights = constrained.problem.weights(constrained.multipliers.values).clamp(min=0).tolist()
    logged = fixed.state.log_history[0]
    assert [logged[f"weight_{layer}"] for layer in (1, 2, 3)] == pytest.approx(weights)


def test_the_dual_step_is_skipped_with_the_optimizers(tmp_path):
    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            trainer.optimizer._is_overflow = state.global_step in (2, 3)

    trainer = InOrder(bert(), config(tmp_path, dual_optim="sgd"), train_dataset=DATA, callbacks=[Overflow()])
    trainer.train()
    values = [log["multiplier_1"] for log in trainer.state.log_history if "multiplier_1" in log]
    assert trainer.multipliers.steps.item() == 4 and len(set(values)) == len(values)


# ---- what is reported ----


def test_evaluation_reports_the_losses_of_truncated_models(tmp_path):
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=DATA, eval_dataset=DATA_TEST)
    trainer.train()
    metrics = trainer.evaluate()
    losses = []
    for layer in (1, 2, 3):
        stock = Trainer(
            truncated(trainer.model, layer),
            TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
            eval_dataset=DATA_TEST,
        )
        losses.append(stock.evaluate()["eval_loss"])
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(losses[-1], rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(losses[-1], rel=1e-5)
    violations = [f - 0.7 * previous for f, previous in zip(losses, [1.0, *losses])]
    assert metrics["eval_max_violation"] == pytest.approx(max(violations), abs=1e-5)
    assert metrics["eval_feasible"] == float(max(violations) <= 0.01)
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_evaluation_before_training_and_by_batches_of_unequal_size(tmp_path):
    args = config(tmp_path, per_device_eval_batch_size=7)
    trainer = DescentTrainer(bert(), args, eval_dataset=DATA_TEST)
    metrics = trainer.evaluate()
    whole = next(batches(DATA_TEST, 32))
    model = bert().eval()
    with torch.no_grad():
        expected = naive_layer_losses(model, whole).tolist()
    assert [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(expected, rel=1e-5)
    assert "eval_feasible" in metrics


def test_the_score_ranks_infeasible_below_feasible_and_feasible_by_loss(tmp_path):
    trainer = DescentTrainer(bert(), config(tmp_path), eval_dataset=DATA_TEST)
    trainer.evaluate()

    def score(*losses):
        return trainer._state.evaluation(torch.tensor(losses), "eval")["eval_feasible_score"]

    feasible = [score(0.7, 0.49, 0.3), score(0.7, 0.49, 0.34), score(0.6, 0.4, 0.0)]
    infeasible = [score(0.9, 0.5, 0.01), score(5.0, 0.5, 0.0), score(float("nan"), 0.1, 0.1)]
    assert feasible[2] > feasible[0] > feasible[1] > 0 > infeasible[0] > infeasible[1]
    assert math.isnan(infeasible[2])


def test_the_best_feasible_checkpoint_is_kept(tmp_path):
    args = config(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="feasible_score",
    )  # fmt: skip
    trainer = DescentTrainer(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
    trainer.train()
    scores = {log["step"]: log["eval_feasible_score"] for log in trainer.state.log_history if "eval_loss" in log}
    assert trainer.state.best_model_checkpoint.endswith(f"-{max(scores, key=scores.get)}")


def test_logs_are_scalars_per_layer_and_loss_is_the_task_loss(tmp_path):
    trainer = InOrder(bert(), config(tmp_path, max_steps=3, dual_learning_rate=1.0), train_dataset=DATA)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    for name in ("layer_loss", "violation", "multiplier", "weight"):
        assert all(isinstance(log[f"{name}_{layer}"], float) for log in logs for layer in (1, 2, 3)), name
    assert [log["loss"] for log in logs] == pytest.approx([log["layer_loss_3"] for log in logs], rel=1e-6)
    last = logs[-1]
    assert last["violation_2"] == pytest.approx(last["layer_loss_2"] - 0.7 * last["layer_loss_1"], abs=1e-6)
    final = trainer.state.log_history[-1]
    assert final["train_feasible"] in (0.0, 1.0) and "train_max_violation" in final


def test_the_progress_bar_leaves_single_layers_out(tmp_path, capsys):
    trainer = DescentTrainer(bert(), config(tmp_path, disable_tqdm=False), train_dataset=DATA)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert ProgressCallback not in kinds and PrinterCallback not in kinds
    trainer.train()
    printed = capsys.readouterr()
    assert "max_violation" in printed.out + printed.err and "layer_loss_1" not in printed.out + printed.err


def test_plain_training_has_the_callbacks_of_trainer(tmp_path):
    def kinds(trainer):
        return [type(callback) for callback in trainer.callback_handler.callbacks]

    args = config(tmp_path, objective="erm", disable_tqdm=False)
    assert kinds(DescentTrainer(bert(), args)) == kinds(Trainer(bert(), args))


def test_a_progress_bar_of_ones_own_stays(tmp_path):
    class Own(ProgressCallback):
        pass

    trainer = DescentTrainer(bert(), config(tmp_path, disable_tqdm=False), callbacks=[Own])
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(Own) == 1 and ProgressCallback not in kinds


def test_infeasibility_is_said_at_the_end(tmp_path, caplog):
    logging.getLogger("hf_descent").propagate = True
    DescentTrainer(bert(), config(tmp_path, descent_alpha=0.9), train_dataset=DATA).train()
    assert "NOT met" in caplog.text and "layer" in caplog.text


def test_hidden_states_do_not_pile_up_as_predictions(tmp_path):
    model = bert()
    model.config.output_hidden_states = True
    trainer = DescentTrainer(model, config(tmp_path), train_dataset=DATA)
    trainer.train()
    assert trainer.predict(DATA_TEST).predictions.shape == (32, 3)


# ---- faults ----


@pytest.mark.parametrize("stop", [False, True])
def test_a_non_finite_loss_skips_the_duals_and_is_reported_once(tmp_path, caplog, stop):
    def poisoned(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs["logits"], labels, reduction="mean")
        poisoned.calls += 1
        # The value alone is spoilt, so that the weights stay finite.
        return loss + float("nan") if poisoned.calls in range(12, 15) else loss

    poisoned.calls = 0
    args = config(tmp_path, max_steps=8, learning_rate=0.0, stop_on_nonfinite=stop, dual_optim="sgd")
    trainer = InOrder(bert(), args, train_dataset=DATA, compute_loss_func=poisoned)
    trainer.train()
    assert torch.isfinite(trainer.multipliers.values).all()
    assert caplog.text.count("was not finite") == 1
    assert trainer.state.global_step < 8 if stop else trainer.state.global_step == 8
    if not stop:
        assert trainer.multipliers.steps.item() == 7


def test_a_multiplier_at_its_cap_is_said_once(tmp_path, caplog):
    args = config(tmp_path, max_steps=6, multiplier_max=0.05, descent_alpha=0.9, dual_learning_rate=0.05)
    trainer = DescentTrainer(bert(), args, train_dataset=DATA)
    trainer.train()
    assert trainer.multipliers.values.max() == pytest.approx(0.05) and caplog.text.count("multiplier_max") == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fp16": True}, "fp16"),
        ({"torch_compile": True}, "torch_compile"),
        ({"descent_alpha": [0.1, 0.2]}, "2 values but the model has 3 layers"),
        ({"constrained_layers": [1, 4]}, "names layer 4 but the model has 3"),
        ({"objective": "fixed", "fixed_multipliers": [0.1]}, "1 values but the model has 3 layers"),
        ({"objective": "fixed", "fixed_multipliers": "nowhere"}, "nowhere"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_first_step(tmp_path, arguments, match):
    with pytest.raises(ValueError, match=match):
        DescentTrainer(bert(), config(tmp_path, **arguments), train_dataset=DATA).train()
    assert not (tmp_path / "checkpoint-1").exists()


def test_data_parallel_is_refused(tmp_path):
    args = config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="DataParallel"):
        DescentTrainer(bert(), args, train_dataset=DATA)


def test_a_batch_without_labels_is_refused(tmp_path):
    data = [{name: value for name, value in row.items() if name != "labels"} for row in DATA]
    with pytest.raises(ValueError, match="no tensor of labels"):
        DescentTrainer(bert(), config(tmp_path), train_dataset=data).train()


def test_a_constrained_layer_without_gradient_is_refused_and_can_be_left_out(tmp_path):
    def frozen():
        model = bert()
        for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
            part.requires_grad_(False)
        return model

    with pytest.raises(ValueError, match=r"layer 1 has no gradient.*constrained_layers"):
        DescentTrainer(frozen(), config(tmp_path), train_dataset=DATA).train()
    trainer = DescentTrainer(frozen(), config(tmp_path, constrained_layers=[2, 3]), train_dataset=DATA)
    trainer.train()
    assert trainer.multipliers.values[0] == 0 and trainer.multipliers.values[1] > 0


def test_neftune_is_removed_when_training_raises(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("stopped")

    model = bert()
    trainer = DescentTrainer(model, config(tmp_path, neftune_noise_alpha=5.0), train_dataset=DATA, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert not model.get_input_embeddings()._forward_hooks


# ---- with Trainer's other parts ----


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(tmp_path, reentrant):
    finals = []
    for checkpointing in (False, True):
        args = config(
            tmp_path,
            activation_checkpointing=checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        trainer = InOrder(bert(), args, train_dataset=DATA)
        trainer.train()
        finals.append(trainer)
    torch.testing.assert_close(finals[0].multipliers.values, finals[1].multipliers.values)
    for (name, a), b in zip(finals[0].model.named_parameters(), finals[1].model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_bf16_autocast_follows_full_precision(tmp_path):
    finals = []
    for bf16 in (False, True):
        trainer = InOrder(bert(), config(tmp_path, bf16=bf16, learning_rate=1e-3), train_dataset=DATA)
        trainer.train()
        finals.append(trainer.multipliers.values)
        assert trainer.multipliers.values.dtype == torch.float32
    assert not torch.equal(*finals)
    torch.testing.assert_close(*finals, rtol=0.02, atol=0.005)


def test_hyperparameter_search_starts_each_trial_afresh_and_minimises_eval_loss(tmp_path):
    pytest.importorskip("optuna")
    starts = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                starts.append(trainer.multipliers.steps.item())

    trainer = DescentTrainer(
        args=config(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=4),
        model_init=lambda: bert(),
        train_dataset=DATA,
        eval_dataset=DATA_TEST,
        compute_metrics=lambda prediction: {"constant": 100.0},
        callbacks=[Watch()],
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "descent_alpha": trial.suggest_float("descent_alpha", 0.1, 0.4),
            "dual_learning_rate": trial.suggest_float("dual_learning_rate", 0.01, 0.1),
        },
        n_trials=3,
    )
    assert starts == [1.0, 1.0, 1.0]  # one dual step each, not 1, 5, 9
    assert 0 < best.objective < 10 and 0.1 <= best.hyperparameters["descent_alpha"] <= 0.4
    with pytest.raises(ValueError, match="direction"):
        trainer.hyperparameter_search(direction="maximize", n_trials=1)


def test_a_search_over_objectives_takes_dual_steps_where_the_trial_has_duals(tmp_path):
    pytest.importorskip("optuna")
    steps = []

    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            steps.append(trainer.multipliers and trainer.multipliers.steps.item())

    trainer = DescentTrainer(
        args=config(tmp_path, objective="erm", max_steps=2), model_init=lambda: bert(), train_dataset=DATA,
        eval_dataset=DATA_TEST, callbacks=[Watch()],
    )  # fmt: skip
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"objective": ["erm", "descent", "erm"][trial.number]}, n_trials=3
    )
    assert steps == [None, 2.0, None]


def test_auto_find_batch_size_starts_afresh(tmp_path):
    class TooLarge(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if trainer._train_batch_size > 7 and state.global_step == 3:
                raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer = DescentTrainer(
        bert(), config(tmp_path, auto_find_batch_size=True), train_dataset=DATA, callbacks=[TooLarge()]
    )
    trainer.train()
    assert trainer._train_batch_size == 7 and trainer.multipliers.steps.item() == 6


def test_lora_trains_adapters_and_head_only(tmp_path):
    peft = pytest.importorskip("peft")
    base = bert()
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    trainer = DescentTrainer(peft.get_peft_model(base, lora), config(tmp_path, noise_gamma=0.3), train_dataset=DATA)
    trainer.train()
    trainer.save_model()
    assert trainer.multipliers.values.max() > 0
    for name, parameter in trainer.model.get_base_model().named_parameters():
        if "lora" in name or "modules_to_save" in name:
            continue
        origin = name.replace("base_layer.", "").replace("original_module.", "")
        assert torch.equal(parameter, before[origin]), name
    loaded = peft.PeftModel.from_pretrained(bert(), str(tmp_path)).eval()
    batch = next(batches(DATA))
    torch.testing.assert_close(loaded(**batch).logits, trainer.model.eval()(**batch).logits)


def first_token(model, hidden, inputs):
    return model.classifier(hidden[:, 0])


def token_mean(model, hidden, inputs):
    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
    return model.classifier((hidden * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("readout", [first_token, token_mean])
def test_a_readout_of_ones_own_scores_every_layer_and_gives_the_predictions(tmp_path, readout):
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=DATA, eval_dataset=DATA_TEST, readout=readout)
    trainer.train()
    metrics = trainer.evaluate()
    batch, model = next(batches(DATA_TEST, 32)), trainer.model.eval()
    with torch.no_grad():
        hidden_states = model.bert(
            batch["input_ids"], batch["attention_mask"], output_hidden_states=True
        ).hidden_states[1:]
        logits = [readout(model, hidden, batch) for hidden in hidden_states]
    losses = [F.cross_entropy(logit, batch["labels"]).item() for logit in logits]
    assert [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(losses, rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(losses[-1], rel=1e-5)
    unlabelled = [{name: value for name, value in row.items() if name != "labels"} for row in DATA_TEST]
    for data in (DATA_TEST, unlabelled):
        torch.testing.assert_close(torch.tensor(trainer.predict(data).predictions), logits[-1], rtol=1e-4, atol=1e-5)


def test_a_layer_loss_reads_attributes_or_keys(tmp_path):
    """The "auto" settings call it on outputs of their own."""

    def by_attribute(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels)

    def by_key(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    def losses(loss):
        args = config(tmp_path, max_steps=3, initial_loss_bound="auto", dual_warmup_steps=1)
        trainer = DescentTrainer(bert(), args, train_dataset=DATA, layer_loss_fn=loss)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    own = losses(by_attribute)
    assert len(own) == 3 and own == losses(by_key)


def test_a_layer_loss_of_ones_own_scores_every_layer(tmp_path):
    weight = torch.tensor([1.0, 3.0, 0.5])

    def weighted(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, weight)

    trainer = DescentTrainer(bert(), config(tmp_path), eval_dataset=DATA_TEST, layer_loss_fn=weighted)
    metrics = trainer.evaluate()
    batch = next(batches(DATA_TEST, 32))
    for layer in (1, 2, 3):
        with torch.no_grad():
            logits = [truncated(bert(), layer).eval()(b["input_ids"], b["attention_mask"]).logits for b in [batch]]
        per_batch = [
            F.cross_entropy(logits[0][i : i + 8], batch["labels"][i : i + 8], weight).item() for i in range(0, 32, 8)
        ]
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(sum(per_batch) / 4, rel=1e-5)
    with pytest.raises(ValueError, match="not both"):
        DescentTrainer(bert(), config(tmp_path), layer_loss_fn=weighted, compute_loss_func=weighted)


@pytest.mark.parametrize("objective", ["hinge", "quadratic"])
def test_penalties_are_taken_on_the_mean_losses_of_a_micro_batch(tmp_path, objective):
    """One SGD step of the penalised model equals a step on the penalty written out; empty micro-batches are zero."""
    args = config(
        tmp_path, objective=objective, penalty_coefficient=2.0, descent_alpha=0.4, max_steps=1, optim="sgd",
        learning_rate=0.5, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = InOrder(bert(), args, train_dataset=DATA)
    trainer.train()
    model = bert()
    f = naive_layer_losses(model, next(batches(DATA)))
    excess = (f - 0.6 * torch.cat([torch.ones(1), f[:-1]])).clamp(min=0)
    (f[-1] + 2 * (excess.sum() if objective == "hinge" else excess.square().sum() / 2)).backward()
    for (name, a), b in zip(trainer.model.named_parameters(), model.parameters()):
        torch.testing.assert_close(a, b - 0.5 * b.grad, rtol=1e-4, atol=1e-6, msg=name)

    data = language_data(8, ragged=False)
    data[3]["labels"] = torch.full_like(data[3]["labels"], -100)
    args = config(
        tmp_path, objective=objective, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=8
    )
    trainer = InOrder(llama(), args, train_dataset=data)
    trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_robustness_is_scored_by_the_trainer_s_own_loss(tmp_path):
    args = config(tmp_path, label_smoothing_factor=0.2, eval_gammas=[0.0, 1.0], noise_gamma=0.5)
    trainer = DescentTrainer(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
    trainer.train()
    curve = trainer.evaluate_robustness()
    assert curve.losses[0, 0] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    assert any(key.startswith("eval_accuracy") for log in trainer.state.log_history for key in log)
    with pytest.raises(ValueError, match="eval_gammas"):
        DescentTrainer(bert(), config(tmp_path), eval_dataset=DATA_TEST).evaluate_robustness()


def test_auto_bound_of_a_weighted_loss_is_its_best_constant_prediction(tmp_path):
    weight = torch.tensor([1.0, 20.0, 1.0])

    def weighted(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, weight)

    args = config(tmp_path, initial_loss_bound="auto", dual_warmup_steps=5, max_steps=6)
    trainer = InOrder(bert(), args, train_dataset=DATA, compute_loss_func=weighted)
    trainer.train()
    labels = torch.tensor([row["labels"] for row in DATA[:40]])
    logits = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits.expand(40, 3), labels, weight)
        loss.backward()
        optimizer.step()
    assert trainer.problem.initial_loss_bound == pytest.approx(loss.item(), rel=0.02)


def test_evaluation_in_the_warm_up_of_auto_has_a_score_below_every_other(tmp_path):
    args = config(
        tmp_path, descent_alpha="auto", initial_loss_bound="auto", dual_warmup_steps=4, max_steps=6,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="feasible_score",
    )  # fmt: skip
    trainer = DescentTrainer(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
    trainer.train()
    scores = [log["eval_feasible_score"] for log in trainer.state.log_history if "eval_loss" in log]
    assert scores[0] < -1e6 < scores[-1] and not trainer.state.best_model_checkpoint.endswith("-2")
    best = load_file(f"{trainer.state.best_model_checkpoint}/descent_state.safetensors")["multipliers.values"]
    assert torch.equal(trainer.multipliers.values, best)


def test_fixed_multipliers_of_a_run_on_some_layers_keep_its_constraints(tmp_path):
    args = config(tmp_path / "constrained", dual_learning_rate=0.3, constrained_layers=[1, 3])
    constrained = InOrder(bert(), args, train_dataset=DATA)
    constrained.train()
    constrained.save_model()
    args = config(
        tmp_path, objective="fixed", fixed_multipliers=str(tmp_path / "constrained"), negative_weights="keep"
    )
    fixed = InOrder(bert(), args, train_dataset=DATA)
    fixed.train()
    weights = constrained.problem.weights(constrained.multipliers.values).tolist()
    assert [fixed.state.log_history[0][f"weight_{layer}"] for layer in (1, 2, 3)] == pytest.approx(weights)


@pytest.mark.parametrize(
    "arguments", [{"constrained_layers": [1, 4]}, {"descent_alpha": [0.1, 0.2]}, {"frozen": True}]
)
def test_auto_does_not_put_off_the_checks_to_the_end_of_warm_up(tmp_path, arguments):
    model = bert()
    if arguments.pop("frozen", False):
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
    settings = {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 4, **arguments}
    trainer = DescentTrainer(model, config(tmp_path, **settings), train_dataset=DATA)
    with pytest.raises(ValueError, match="layer"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_warm_up_longer_than_the_run_is_said(tmp_path, caplog):
    DescentTrainer(bert(), config(tmp_path, dual_warmup_steps=500), train_dataset=DATA).train()
    assert "never act" in caplog.text


def test_noise_with_persistent_workers_does_not_evaluate_on_the_training_data(tmp_path):
    args = config(tmp_path, noise_gamma=0.5, dataloader_num_workers=1, dataloader_persistent_workers=True, max_steps=2)
    trainer = DescentTrainer(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST[:8])
    trainer.train()
    assert trainer.num_examples(trainer.get_eval_dataloader()) == 8


def test_the_label_shift_is_the_model_s_own_not_its_name_s(tmp_path):
    """GPT2LMHeadModel shifts its labels; the items of the first step already count so."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=3, n_head=2))
    data = language_data(ragged=False)
    trainer = InOrder(model, config(tmp_path, learning_rate=0.0, max_steps=2), train_dataset=data)
    trainer.train()
    logged = [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]
    batch = {name: torch.stack([row[name] for row in data[:8]]) for name in data[0]}
    model.eval()
    with torch.no_grad():
        assert logged[0] == pytest.approx(model(**batch).loss.item(), rel=0.05)  # dropout
    assert logged[0] == pytest.approx(logged[1], rel=0.05)
