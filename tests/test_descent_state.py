import logging
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import InOrder, bert, classification_data, config, truncated
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_descent import DescentTrainer


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


# ---- schedule, multipliers, faults ----


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


def test_infeasibility_is_said_at_the_end(tmp_path, caplog):
    logging.getLogger("hf_descent").propagate = True
    DescentTrainer(bert(), config(tmp_path, descent_alpha=0.9), train_dataset=DATA).train()
    assert "NOT met" in caplog.text and "layer" in caplog.text
