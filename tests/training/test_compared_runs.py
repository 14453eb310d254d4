"""A verdict in a later process compares with the plain run, the start and the warm-up of the run that it judges."""

import pytest
import torch
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config
from transformers import AutoModelForSequenceClassification

from hf_descent import DescentTrainer
from hf_descent.training import compared_runs


ROWS = classification_data(64, pad=False)
TEST = classification_data(48, seed=1, pad=False)
OTHER = classification_data(48, seed=2, pad=False)
NO_PLAIN_RUN = "plain training was not measured on these data"


def make(folder, model, **settings):
    settings = {
        "max_steps": 4,
        "dual_warmup_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    } | settings
    args = config(folder, **settings)
    return DescentTrainer(model, args, train_dataset=ROWS, eval_dataset=TEST)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was trained with its plain run, and the first line of its verdict."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make(folder, bert(dropout=0.1))
    trainer.train_with_plain()
    trainer.save_model()
    return folder, price_line(trainer.evaluate_layers().certificate())


def price_line(verdict):
    return str(verdict).splitlines()[0]


def later(run, folder=None, loaded=None, **settings):
    """A trainer of another process, with the model of the run."""
    model = AutoModelForSequenceClassification.from_pretrained(run if loaded is None else loaded)
    return make(run if folder is None else folder, model, **settings)


def verdict_of_evaluate(trainer, *data):
    trainer.evaluate(*data)
    return trainer._run.record.certificate


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="the same settings"),
        pytest.param({"learning_rate": 0.5, "max_steps": 1}, id="other settings"),
        pytest.param({"per_device_eval_batch_size": 5}, id="batches of another size"),
    ],
)
def test_both_evaluations_find_the_plain_run_of_the_same_rows(run, tmp_path, settings):
    folder, expected = run
    assert ", plain training " in expected and "; before training " in expected
    trainer = later(folder, **settings)
    assert price_line(verdict_of_evaluate(trainer)) == expected
    assert price_line(trainer.evaluate_layers().certificate()) == expected
    elsewhere = later(folder, tmp_path, **settings)
    assert price_line(verdict_of_evaluate(elsewhere, TEST)) == expected
    assert price_line(elsewhere.evaluate_layers(TEST).certificate()) == expected


def test_a_set_in_the_place_of_another_has_none_of_its_numbers(tmp_path):
    trainer = make(tmp_path, bert())
    trainer.train_with_plain()
    before = trainer.evaluate()

    trainer.eval_dataset = OTHER  # of as many rows
    for price in (
        verdict_of_evaluate(trainer).price,
        trainer.evaluate_layers().certificate().price,
    ):
        expected = verdict_of_evaluate(trainer, list(OTHER)).price
        assert price.loss == pytest.approx(expected.loss) and price.loss != before["eval_loss"]
        assert price.plain is None
        assert price.references == pytest.approx(expected.references)

    references = trainer.evaluate_layers().references
    assert references and all(
        each.rows is None for each in references
    )  # in pairs only of the same rows


def test_rows_are_compared_in_pairs_also_where_training_groups_them_by_length(tmp_path):
    trainer = make(tmp_path, bert(), train_sampling_strategy="group_by_length")
    trainer.train_with_plain()
    verdict = verdict_of_evaluate(trainer)
    assert price_line(verdict) == price_line(trainer.evaluate_layers().certificate())

    start = trainer.evaluate_layers().references[0].rows
    untrained = make(tmp_path, bert()).evaluate_layers(problem=None)
    torch.testing.assert_close(start, untrained.row_sums[:, -2:], rtol=1e-4, atol=1e-6)


def test_a_plain_run_says_nothing_of_other_rows(run):
    trainer = later(run[0])
    for verdict in (
        verdict_of_evaluate(trainer, OTHER),
        trainer.evaluate_layers(OTHER).certificate(),
        verdict_of_evaluate(trainer, TEST[:47]),
    ):
        assert NO_PLAIN_RUN in price_line(verdict)
        assert "; before training " in price_line(verdict)  # which was read on other rows


def test_a_checkpoint_is_compared_with_the_plain_run_beside_its_run(run, tmp_path):
    trainer = later(run[0], tmp_path, run[0] / "checkpoint-2")
    assert ", plain training " in price_line(verdict_of_evaluate(trainer))


def test_a_training_with_other_settings_is_not_compared_with_the_plain_run(run):
    trainer = make(run[0], bert(), learning_rate=0.5, max_steps=1, save_strategy="no")
    trainer.train()
    assert NO_PLAIN_RUN in price_line(verdict_of_evaluate(trainer))


def test_evaluations_in_training_find_it_and_the_training_stays_the_same(
    run, tmp_path, monkeypatch
):
    reads = []
    fingerprint_of = compared_runs.fingerprint_of
    monkeypatch.setattr(
        compared_runs,
        "fingerprint_of",
        lambda *args, **kw: reads.append(1) or fingerprint_of(*args, **kw),
    )
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    weights = {}
    for folder in (run[0], tmp_path):
        trainer = make(folder, bert(dropout=0.1), **settings)
        trainer.train()
        weights[folder] = torch.cat(
            [value.flatten() for value in trainer.model.state_dict().values()]
        )
        found = trainer._run.record.certificate.price.plain
        assert (found is not None) == (folder == run[0])
    assert weights[run[0]].equal(weights[tmp_path])
    assert len(reads) == 1  # at the first of four evaluations, where there is a plain run


def test_plain_training_looks_for_no_plain_run(run):
    assert compared_runs.plain_profiles_of(later(run[0], objective="erm"), origin=None) == []
