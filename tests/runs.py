"""Made-up results of runs, for the tests of comparisons and figures."""

import json

import numpy as np

from hf_descent import DescentProblem
from hf_descent.evaluation import LayerProfile, NoiseCurve
from hf_descent.evaluation.comparison import Run


GAMMAS = np.array([0.0, 1.0, 2.0])


def make_curve(accuracies, gammas=GAMMAS, noise_seed=0):
    """A curve of rows with these accuracies, at all levels, but for a fall of 0.1 a level."""
    parts = np.asarray(accuracies, dtype=float)[:, None] - 0.1 * np.arange(len(gammas))
    values = parts.mean(axis=0)[:, None]
    settings = {"seed": noise_seed, "perturbation": "gaussian"}
    return NoiseCurve(
        "accuracy",
        gammas,
        values,
        np.ones_like(values),
        1.0,
        parts,
        settings=settings,
    )


def make_profile(losses, gamma=0.0, feasible=None):
    losses = np.asarray(losses, dtype=float)
    problem = None
    row_sums = np.ones((40, len(losses) + 1))
    row_sums[:, :-1] = losses
    if feasible is not None:  # above chance no layer is
        problem = DescentProblem(
            1e-3, losses[0] * (1.1 if feasible else 0.9), len(losses)
        ).state_dict()
    return LayerProfile(
        "accuracy", losses, 1 - losses, gamma, problem, chance=9.0, row_sums=row_sums
    )


def make_run(
    accuracies, seed=0, objective="erm", feasible=None, losses=(0.9, 0.6, 0.4), folder="run",
    gammas=GAMMAS, noise_seed=0, **arguments,
):  # fmt: skip
    arguments = {"objective": objective, "noise_gamma": 0.0, **arguments, "seed": seed}
    summary = {"objective": objective, "arguments": arguments}
    profiles = {gamma: make_profile(losses, gamma, feasible) for gamma in (0.0, 2.0)}
    curve = make_curve(accuracies, gammas, noise_seed)
    curve.losses *= 1 + seed  # other weights have other losses
    return Run(folder, curve, profiles, summary)


def save_run(folder, run):
    folder.mkdir(exist_ok=True)
    run.curve.to_json(folder / "noise_curve.json")
    for profile in run.profiles.values():
        profile.to_json(folder / f"layer_profile{profile.ending}.json")
    (folder / "descent_config.json").write_text(json.dumps(run.summary))
    return str(folder)
