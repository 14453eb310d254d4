import logging
import math

import pytest
import torch
from tiny import InOrder, bert, classification_data, config, truncated
from transformers import Trainer, TrainingArguments

from hf_descent import DescentTrainer


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


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
