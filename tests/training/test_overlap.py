"""Whether an evaluation is on rows that training knew."""

import copy

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from tiny.data import Stream, classification_data
from tiny.models import bert
from tiny.sft import TOKENIZER, texts
from tiny.sft import llama as tuned_llama
from tiny.training import config, trained
from torch.utils.data import DataLoader, Subset

from hf_descent import (
    DescentTrainer,
    SFTDescentConfig,
    SFTDescentTrainer,
)
from hf_descent.training.overlap import share_rows


DATA = classification_data(420)
FRESH = classification_data(300, seed=1)


def stored(count=100, name="x"):
    return Dataset.from_dict({name: [[row] for row in range(count)], "labels": [0] * count})


def two(row):
    return {"two": 2}


LISTED = list(DATA)
STORED = stored()
PARTS = STORED.train_test_split(0.2, seed=0)
COUNTED = torch.utils.data.TensorDataset(torch.arange(100))


PAIRS = [
    (LISTED, LISTED, True),
    (LISTED[:50], LISTED[49:], True),
    (LISTED[:50], LISTED[50:], False),
    (Subset(LISTED, [3, 5]), LISTED[:4], True),
    (Subset(LISTED, [4, 5]), LISTED[:4], False),
    (LISTED, copy.deepcopy(LISTED), False),
    (COUNTED, COUNTED, True),
    (Subset(COUNTED, range(9)), COUNTED, True),
    (Subset(Subset(COUNTED, range(50, 60)), [1]), Subset(COUNTED, [51]), True),
    (Subset(Subset(COUNTED, range(50, 60)), [1]), Subset(COUNTED, [1]), False),
    (DataLoader(COUNTED), COUNTED, True),
    (STORED, STORED, True),
    (STORED, stored(), True),  # `datasets` gives equal values one fingerprint
    (STORED, stored(99), False),
    (STORED.select(range(9)), STORED, True),
    (STORED.select(range(9)), STORED.select(range(8, 20)), True),
    (STORED.select(range(9)), STORED.select(range(9, 20)), False),
    (STORED.select([3, 1]), STORED.select([7, 3]), True),
    (STORED.select([3, 1]), STORED.select([7, 2]), False),
    (PARTS["train"], STORED, True),
    (PARTS["train"], PARTS["test"], False),
    (PARTS["train"], PARTS["test"].remove_columns("x"), False),
    (STORED.remove_columns("x"), PARTS["test"], True),
    (Subset(STORED, [2, 3]), STORED.select([3]), True),
    (Subset(STORED, [2, 3]), STORED.select([4]), False),
    (concatenate_datasets([stored(5), STORED]), PARTS["test"], True),
    (STORED.map(two), STORED.map(two), True),
    (STORED.map(two), stored(99).map(two), False),
    (STORED, STORED.rename_columns({"x": "y", "labels": "z"}), False),
    (STORED, LISTED, False),
    (None, STORED, False),
    (None, None, False),
    (Stream(iter(DATA)), Stream(iter(DATA)), False),
]


@pytest.mark.parametrize("case", range(len(PAIRS)))
def test_shared_rows_are_told_by_identity(case):
    first, second, known = PAIRS[case]
    assert share_rows(first, second) == known
    assert share_rows(second, first) == known


def test_no_row_is_read_to_find_shared_ones():
    class Files(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            raise AssertionError("a row was read")

    files = Files()
    assert share_rows(Subset(files, range(9)), files)
    assert not share_rows(files, STORED.with_transform(files.__getitem__))
    assert share_rows(STORED.with_transform(files.__getitem__), PARTS["test"])


def verdict_says_it(trainer, rows):
    """Whether the verdict of an evaluation says that training knew the rows, in each way to ask for one."""
    trainer.evaluate(rows)
    said = trainer._run.record.certificate.also_selected
    assert trainer.evaluate_layers(rows).certificate().also_selected == said
    return said


def test_a_verdict_says_that_its_rows_trained_the_model_or_moved_the_multipliers(tmp_path):
    given = {"train_dataset": DATA, "dual_dataset": FRESH[50:]}
    trainer = DescentTrainer(bert(), config(tmp_path, max_steps=1), eval_dataset=DATA[:20], **given)

    assert not verdict_says_it(trainer, DATA)

    trainer.train()

    for rows, known in (
        (None, True),
        (DATA, True),
        (Subset(DATA, range(100)), True),
        (FRESH[40:60], True),
        (FRESH[:50], False),
    ):
        assert verdict_says_it(trainer, rows) == known

    trainer.predict(DATA[:20])

    assert trainer._run.record.certificate.also_selected

    trainer.predict(FRESH[:50])
    before = trainer._run.record.certificate

    assert not before.also_selected

    trainer.predict(without_labels(FRESH))

    assert trainer._run.record.certificate is before  # such rows say nothing


def test_a_verdict_says_nothing_of_equal_rows_that_are_stored_twice(tmp_path):
    """It says no more than is known, and comparing rows would cost a reading of all."""
    trainer = trained(bert(), config(tmp_path, max_steps=1), train_dataset=DATA)
    assert not verdict_says_it(trainer, copy.deepcopy(DATA))


def without_labels(rows):
    return [{name: value for name, value in row.items() if name != "labels"} for row in rows]


def test_of_several_evaluation_sets_each_is_judged_by_its_own_rows(tmp_path):
    sets = {"fresh": FRESH, "trained": DATA[:3]}
    trainer = trained(bert(), config(tmp_path, max_steps=1), train_dataset=DATA, eval_dataset=sets)
    for name, known in (("fresh", False), ("trained", True)):
        for given in (name, sets[name]):
            assert verdict_says_it(trainer, given) == known
    trainer.args.eval_strategy = "steps"  # whose evaluations choose, of all of the sets
    assert verdict_says_it(trainer, "fresh")


def test_rows_that_chose_settings_in_a_search_are_no_longer_fresh(tmp_path):
    pytest.importorskip("optuna")
    given = {"model_init": lambda: bert(), "train_dataset": DATA, "eval_dataset": FRESH[:100]}
    trainer = DescentTrainer(None, config(tmp_path, max_steps=1), **given)
    trainer.hyperparameter_search(lambda trial: {"descent_alpha": 0.2}, n_trials=1)
    trainer.train()
    for rows, also_selected in ((None, True), (FRESH[:100], True), (FRESH[100:], False)):
        assert verdict_says_it(trainer, rows) == also_selected
    assert trainer._run_summary()["select_rows"] == 100


def test_rows_that_trl_has_not_tokenised_are_known_to_have_trained_the_model(tmp_path):
    args = SFTDescentConfig.from_training_arguments(config(tmp_path), max_length=12)
    data, others = (Dataset.from_dict({"text": rows}) for rows in (texts(24), texts(48)[24:]))
    trainer = SFTDescentTrainer(tuned_llama(), args, train_dataset=data, processing_class=TOKENIZER)
    trainer.train()
    for rows, known in ((data, True), (others, False)):
        assert trainer.evaluate_layers(rows).facts["also_selected"] == known
