"""How people use the package, for mypy alone: it reads the types of the public names here (`.ci/run`).

A line with `type: ignore` has to be an error; mypy says so where it is none.
"""

import torch
from torch import nn

from hf_descent import (
    DescentConfig,
    DescentObjective,
    DescentProblem,
    DescentTrainer,
    EmbeddingNoise,
    Multipliers,
    layer_profile,
    noise_curve,
)
from hf_descent.early_exit import truncate
from hf_descent.evaluation import Certificate, LayerProfile, NoiseCurve


def train(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> Certificate | None:
    args = DescentConfig("out", max_steps=2, exit_targets={3: 0.05})
    trainer = DescentTrainer(model, args, train_dataset=rows, eval_dataset=rows, readout="mean")
    trainer.train()
    multipliers: Multipliers | None = trainer.multipliers
    problem: DescentProblem | None = trainer.problem
    assert multipliers is not None and problem is not None
    values: torch.Tensor = multipliers.values
    print(values, problem.num_layers)
    curve: NoiseCurve = trainer.evaluate_robustness(rows, gammas=[0.0, 1.0])
    profile: LayerProfile = trainer.evaluate_layers(rows)
    print(curve.gammas, trainer.noise_sigma().is_integer())
    return profile.certificate()


def by_hand(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> None:
    args = DescentConfig("out", eval_gammas=[0.5], noise_gamma=0.5)
    objective = DescentObjective(model, rows, args, max_steps=10)
    loss: torch.Tensor = objective(model, rows[0])
    loss.backward()
    objective.step()
    with EmbeddingNoise(model, 1.0, 0, 0.5):
        model(**rows[0])


def wrong(trainer: DescentTrainer, problem: DescentProblem) -> None:
    trainer.noise_sigma().nothing()  # type: ignore[attr-defined]
    DescentConfig("out", descent_strength="high")  # type: ignore[arg-type]
    problem.feasible(losses=1)  # type: ignore[call-arg]
    Multipliers("three", 0.1)  # type: ignore[arg-type]


__all__ = ["by_hand", "layer_profile", "noise_curve", "train", "truncate", "wrong"]
