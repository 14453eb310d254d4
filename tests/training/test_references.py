"""The last layer before training and after the warm-up, which verdicts compare with."""

import pytest
import torch
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config, fitted
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_descent import DescentTrainer
from hf_descent.evaluation import LayerProfile
from hf_descent.evaluation.price import START, WARMUP
from hf_descent.runs import RunFolder
from hf_descent.training import references


DATA = classification_data(128, pad=False)
HELD_OUT = classification_data(64, seed=1, pad=False)


def make(folder, model=None, **settings):
    settings = {
        "max_steps": 8, "dual_warmup_steps": 4, "per_device_train_batch_size": 16, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 7,
    } | settings  # fmt: skip
    model = bert() if model is None else model
    return DescentTrainer(
        model, config(folder, **settings), train_dataset=DATA, eval_dataset=HELD_OUT
    )


def stock_loss(folder, model, rows=HELD_OUT):
    args = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        per_device_eval_batch_size=64,
        disable_tqdm=True,
    )
    return Trainer(model, args, eval_dataset=rows).evaluate()["eval_loss"]


def test_they_are_the_losses_of_the_whole_model_then(tmp_path):
    start = stock_loss(tmp_path, bert())
    plain = fitted(
        make(tmp_path / "plain", max_steps=4, objective="erm", lr_scheduler_type="constant")
    )
    after_warmup = stock_loss(tmp_path, plain.model)
    trainer = make(tmp_path / "run", lr_scheduler_type="constant")
    trainer.train()
    trainer.evaluate()
    verdict = trainer._run.record.certificate

    assert verdict.price.references == {
        START: pytest.approx(start, rel=1e-5),
        WARMUP: pytest.approx(after_warmup, rel=1e-5),
    }
    assert f"before training {start:.4g}" in str(verdict)

    profile = trainer.evaluate_layers()

    assert str(profile.certificate()) == str(verdict)

    profile.to_json(str(tmp_path / "profile.json"))
    read = LayerProfile.from_json(str(tmp_path / "profile.json"))

    assert str(read.certificate()) == str(verdict)

    trainer.save_model()
    summary = RunFolder(tmp_path / "run").summary

    assert summary["last_layer_losses"][START]["loss"] == pytest.approx(start, rel=1e-5)
    known = references.references_of(summary, None, {})
    assert [each.name for each in known] == [START, WARMUP]
    assert not any(each.is_same_data for each in known)
    other_loss = {**summary["origin"], "loss": "another"}
    assert references.references_of(summary, None, other_loss) == []


@pytest.mark.parametrize("objective", ["deep_supervision", "layerskip"])
def test_an_objective_without_constraints_has_no_warm_up(tmp_path, objective):
    trainer = make(tmp_path, objective=objective)
    trainer.train()
    assert "warm-up" not in str(trainer.evaluate_layers().certificate())
    assert [*trainer._run.references.summary()] == [START]


def test_training_goes_on_as_if_nothing_had_been_read(tmp_path):
    losses = []
    for rows in (HELD_OUT, None):
        trainer = make(tmp_path, bert(dropout=0.1))
        trainer.eval_dataset = rows
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert bool(trainer._run.references.summary()) == (rows is not None)
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_a_ruined_model_meets_nothing(tmp_path):
    """Every row refers to its own f_L, so that a ruined model meets them more easily."""
    good = fitted(
        make(tmp_path, objective="erm", max_steps=60, learning_rate=2e-2, dual_warmup_steps=0)
    ).model
    before = stock_loss(tmp_path, good)
    settings = {"exit_targets": {1: 0.9}, "dual_warmup_steps": 0, "descent_alpha": None}
    kept = make(tmp_path / "kept", good, learning_rate=1e-6, **settings)
    kept.train()
    kept.evaluate()

    assert before < 0.8 and kept._run.record.certificate.price.exceeded is None

    with torch.no_grad():
        kept.model.classifier.weight.mul_(0.3)  # as ruinous training would

    assert before < stock_loss(tmp_path, kept.model)

    kept.evaluate()
    verdict = kept._run.record.certificate

    assert verdict.price.exceeded == START and verdict.outcome == "not met"
    assert "above its value before training" in verdict.reasons[0]

    kept.evaluate(classification_data(64, seed=2, pad=False))  # of other rows
    price = kept._run.record.certificate.price

    assert price.references[START] == pytest.approx(before, rel=1e-5) and price.loss > 1.1 * before
    assert price.exceeded is None


def test_a_resumed_run_compares_with_its_own_start(tmp_path):
    trainer = make(tmp_path / "run", save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.evaluate()
    expected = trainer._run.record.certificate.price
    for step in (3, 6):  # before and after the end of the warm-up
        resumed = make(tmp_path / "run", save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        resumed.evaluate()
        found = resumed._run.record.certificate.price
        assert found.references == pytest.approx(expected.references, rel=1e-6)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "is_same"),
    [
        pytest.param(classification_data(64, seed=1, pad=False), True, id="the same rows"),
        pytest.param(classification_data(64, seed=3, pad=False), False, id="other rows"),
    ],
)
def test_a_resumed_run_is_judged_by_readings_of_the_same_rows_alone(
    tmp_path, caplog, rows, is_same
):
    make(tmp_path, save_strategy="steps", save_steps=3, max_steps=3).train()
    resumed = make(tmp_path, save_strategy="no")
    resumed.eval_dataset = rows  # as many, and of the same name
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    profile = resumed.evaluate_layers()
    start = next(each for each in profile.references if each.name == START)
    told = "The evaluation set 'eval_dataset' may have other examples than before"

    assert (start.rows is not None, start.is_same_data) == (is_same, is_same)
    assert (told in caplog.text) == (not is_same)


def test_of_a_large_set_some_batches_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(references, "MOST_ROWS", 21)
    trainer = make(tmp_path)
    trainer.train()
    (read,) = trainer._run.references._at(START)
    (reading,) = read.readings

    assert list(reading) == [0, 4, 8] and [len(part) for part in reading.values()] == [7, 7, 7]

    trainer.evaluate()

    with torch.no_grad():
        batch = {
            name: torch.stack([torch.as_tensor(HELD_OUT[i][name]) for place in (0, 4, 8)
                               for i in range(7 * place, 7 * place + 7)])
            for name in HELD_OUT[0]
        }  # fmt: skip
        expected = bert().eval()(**batch).loss.item()

    assert trainer._run.record.certificate.price.references[START] == pytest.approx(
        expected, rel=1e-5
    )


class Counting(Dataset):
    """The held-out rows, which count how often one of them is fetched."""

    fetched = 0

    def __len__(self):
        return len(HELD_OUT)

    def __getitem__(self, index):
        self.fetched += 1
        return HELD_OUT[index]


@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_batches_that_are_read_are_fetched(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(references, "MOST_ROWS", 21)
    trainer = make(tmp_path, max_steps=1, dataloader_num_workers=workers)
    trainer.train()
    rows = Counting()
    reading = references._last_layer(trainer, trainer._run.layers, rows)

    assert [len(part) for part in reading.values()] == [7, 7, 7]
    assert rows.fetched == (21 if workers == 0 else 0)  # workers count in processes of their own


@pytest.mark.parametrize(("share", "batches"), [(1 / 16, 1), (1, 10)])
def test_a_reading_is_small_beside_training(tmp_path, monkeypatch, share, batches):
    """A sixteenth of 8 steps of 16 rows is 8 rows, of ten batches of 7 the first."""
    monkeypatch.setattr(references, "LEAST_ROWS", 1)
    monkeypatch.setattr(references, "SHARE_OF_TRAINING", share)
    trainer = fitted(make(tmp_path))
    (read,) = trainer._run.references._at(START)
    assert len(read.readings[0]) == batches


class LabelsOf(DescentTrainer):
    """Keeps the labels of the last evaluation."""

    def evaluation_loop(self, dataloader, *args, **kwargs):
        self.evaluated = [row.item() for batch in dataloader for row in batch["labels"]]
        return super().evaluation_loop(dataloader, *args, **kwargs)


@pytest.mark.parametrize("several", [True, False])
def test_persistent_workers_read_the_rows_of_each_set(tmp_path, several):
    sets = {name: classification_data(8, seed=seed) for seed, name in enumerate("ab")}
    trainer = LabelsOf(
        bert(),
        config(
            tmp_path, max_steps=1, dataloader_num_workers=1, dataloader_persistent_workers=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=DATA,
        eval_dataset=sets if several else sets["a"],
    )  # fmt: skip
    trainer.train()
    losses = {
        read.name: read.readings[0][0][:, 0].mean().item()
        for read in trainer._run.references._at(START)
    }
    read = sets.values() if several else [sets["a"]]
    assert list(losses.values()) == pytest.approx(
        [stock_loss(tmp_path, bert(), rows) for rows in read]
    )

    trainer.evaluate(HELD_OUT)
    assert trainer.evaluated == [row["labels"] for row in HELD_OUT]


def test_plain_training_has_no_price(tmp_path):
    trainer = make(tmp_path, objective="erm", exit_targets={1: 0.5})
    trainer.train()
    trainer.evaluate()
    assert trainer._run.record.certificate.price is None
    assert not trainer._run.references.times()
