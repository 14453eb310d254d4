"""The problem that a model is judged by."""

import pytest
from tiny.data import classification_data
from tiny.models import bert, spread
from tiny.training import config, trained

from hf_descent import (
    DescentProblem,
    DescentTrainer,
)
from hf_descent.evaluation import LayerProfile


DATA = classification_data(420)
FRESH = classification_data(300, seed=1)


def test_a_model_that_is_only_evaluated_is_judged_by_each_set_alone(tmp_path):
    """f_0 is that of the set's own labels, whichever came first."""
    of_class = [[row for row in FRESH if row["labels"] == label] for label in (0, 1)]
    sets = {"balanced": FRESH, "skewed": [*of_class[0], *of_class[1][:5]]}
    found = []

    for names in (["balanced", "skewed"], ["skewed", "balanced"]):
        args = config(tmp_path, descent_alpha="line", initial_loss_bound="auto")
        trainer = DescentTrainer(
            spread(bert()), args, eval_dataset={name: sets[name] for name in names}
        )
        found.append(
            {
                name: dict(trainer.evaluate(name), f_0=trainer.problem.initial_loss_bound)
                for name in names
            }
        )
    for name, other in (("balanced", "skewed"), ("skewed", "balanced")):
        bounds = [metrics[name]["f_0"] for metrics in found]
        assert bounds[0] == bounds[1] != pytest.approx(found[0][other]["f_0"], rel=1e-3)
        assert len({metrics[name]["eval_max_violation"] for metrics in found}) == 1


def test_a_profile_of_the_trainer_gives_the_verdict_that_its_card_has(tmp_path):
    trainer = trained(bert(), config(tmp_path, max_steps=4), train_dataset=DATA, eval_dataset=FRESH)

    for rows, also_selected in ((FRESH, False), (DATA, True)):
        profile = trainer.evaluate_layers(rows)
        profile.to_json(str(tmp_path / "profile.json"))
        for verdict in (
            profile.certificate(),
            LayerProfile.from_json(str(tmp_path / "profile.json")).certificate(),
        ):
            assert (
                str(verdict) == str(trainer._run.record.certificate)
                and verdict.also_selected == also_selected
            )
            assert verdict.multipliers == trainer.multipliers.values.tolist()

    # Those of the training are of other rows: layer 1's is no multiplier of the exit.
    verdict = trainer.evaluate_layers(
        problem=DescentProblem(None, 1.0, 3, exit_targets={1: 0.5})
    ).certificate()

    assert verdict.rows == ["exit_1"] and verdict.multipliers is None

    trainer = trained(
        bert(),
        config(tmp_path, max_steps=1, descent_alpha=None, exit_targets={1: 0.5}),
        train_dataset=DATA,
    )

    assert (
        trainer.evaluate_layers(FRESH, problem=DescentProblem(0.3, 1.0, 3))
        .certificate()
        .multipliers
        is None
    )
