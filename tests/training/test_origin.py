"""What a training starts from: a plain run counts for a training from the same weights on the same rows alone."""

import json
import logging
from functools import partial

import pytest
import torch
from tiny.data import Stream, classification_data
from tiny.models import bert
from tiny.tokenizers import word_tokenizer
from tiny.training import config, fitted
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
)

from hf_descent import DescentTrainer
from hf_descent.runs import RunFolder
from hf_descent.training.origin import fingerprint_of_rows, fingerprint_of_weights, origin_of


ROWS = classification_data(64, pad=False)
OTHER_ROWS = classification_data(64, seed=1, pad=False)
TEST = classification_data(48, seed=2, pad=False)


def first_token(model, hidden, inputs):
    return model.classifier(hidden[:, 0])


def last_token(model, hidden, inputs):
    return model.classifier(hidden[:, -1])


def make(folder, model=None, rows=ROWS, readout=None, **settings):
    if model is None:
        model = bert()
    args = config(folder, **{"max_steps": 2, **settings})
    return DescentTrainer(model, args, train_dataset=rows, eval_dataset=TEST, readout=readout)


def adapted(alpha=4, base_seed=0):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=alpha, target_modules=["query"])
    model = bert(seed=base_seed)
    torch.manual_seed(7)
    return peft.get_peft_model(model, lora)


def partly_frozen():
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    return model


def with_sparse_buffer():
    model = bert()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def token_at(model, hidden, inputs, position):
    return model.classifier(hidden[:, position])


def relabelled(rows):
    """The same inputs, a tenth of them with another label."""
    changed = [dict(row) for row in rows]
    for row in changed[::10]:
        row["labels"] = (row["labels"] + 1) % 3
    return changed


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        pytest.param({}, {}, [], id="nothing"),
        pytest.param({}, {"model": lambda: bert(seed=1)}, ["weights"], id="weights"),
        pytest.param({}, {"model": lambda: bert(dropout=0.1)}, ["weights"], id="dropout"),
        pytest.param({"model": adapted}, {"model": adapted}, [], id="nothing of an adapter"),
        pytest.param(
            {"model": adapted},
            {"model": lambda: adapted(base_seed=1)},
            ["weights"],
            id="frozen weights",
        ),
        pytest.param(
            {"model": adapted}, {"model": lambda: adapted(alpha=8)}, ["weights"], id="scale"
        ),
        pytest.param({}, {"model": partly_frozen}, ["trained"], id="frozen parameters"),
        pytest.param({}, {"rows": list(ROWS)}, [], id="a copy of the rows"),
        pytest.param(
            {},
            {"rows": [dict(reversed(row.items())) for row in ROWS]},
            [],
            id="the order of columns",
        ),
        pytest.param({}, {"rows": OTHER_ROWS}, ["rows"], id="rows"),
        pytest.param({}, {"rows": relabelled(ROWS)}, ["rows"], id="labels"),
        pytest.param({}, {"rows": [*ROWS, *ROWS]}, ["rows"], id="number of rows"),
        pytest.param({"readout": first_token}, {"readout": last_token}, ["readout"], id="readout"),
        pytest.param(
            {"readout": partial(token_at, position=0)},
            {"readout": partial(token_at, position=1)},
            ["readout"],
            id="arguments of a readout",
        ),
    ],
)
def test_it_differs_in_what_is_another(tmp_path, one, other, names):
    origins = []
    for given in (one, other):
        model = given["model"]() if "model" in given else None
        trainer = make(tmp_path, **{**given, "model": model})
        origins.append(origin_of(trainer, given.get("readout")))

    assert [name for name in origins[0] if origins[0][name] != origins[1][name]] == names
    assert None not in origins[0].values()


def test_pooling_is_a_readout(tmp_path):
    origins = [origin_of(make(tmp_path, readout=pooling), None) for pooling in ("mean", "cls")]
    assert origins[0]["readout"] != origins[1]["readout"]


def test_weights_that_are_not_all_here_have_no_fingerprint():
    with torch.device("meta"):
        assert fingerprint_of_weights(nn.Linear(2, 2)) is None
    partitioned = nn.Linear(2, 2)
    partitioned.weight.data = torch.empty(0)  # as ZeRO-3 leaves it
    assert fingerprint_of_weights(partitioned) is None
    assert fingerprint_of_weights(with_sparse_buffer()) is None


def test_rows_that_a_collator_masks_by_its_seed_are_the_same_after_it_has_drawn(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.mask_token = "[UNK]"
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    trainer = make(tmp_path, BertForMaskedLM(bert().config), rows)
    trainer.data_collator = DataCollatorForLanguageModeling(tokenizer, seed=1)
    before = fingerprint_of_rows(trainer, rows)
    trainer.data_collator(rows)
    assert before is not None and fingerprint_of_rows(trainer, rows) == before


def test_a_training_records_what_it_started_from_and_its_checkpoints_keep_it(tmp_path):
    expected = origin_of(make(tmp_path), None)
    trainer = fitted(make(tmp_path, save_strategy="steps", save_steps=1))
    trainer.save_model()
    assert RunFolder(tmp_path).summary["origin"] == expected

    resumed = fitted(make(tmp_path, bert(seed=3)), str(tmp_path / "checkpoint-1"))
    resumed.save_model()
    assert RunFolder(tmp_path).summary["origin"] == expected

    elsewhere = fitted(make(tmp_path, rows=OTHER_ROWS), str(tmp_path / "checkpoint-1"))
    elsewhere.save_model()
    assert RunFolder(tmp_path).summary["origin"] == {**expected, "rows": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with its plain run."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make(folder)
    trainer.train_with_plain()
    trainer.save_model()
    return folder


def plain_loss(trainer):
    """f_L of the plain run that both evaluations compare with."""
    trainer.evaluate()
    loss = trainer._run.record.certificate.price.plain
    assert trainer.evaluate_layers().certificate().price.plain == pytest.approx(loss)
    return loss


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param({}, None, id="the same"),
        pytest.param({"model": bert(seed=1)}, "other weights before training", id="weights"),
        pytest.param({"rows": OTHER_ROWS}, "other training examples", id="rows"),
        pytest.param({"readout": last_token}, "another readout", id="readout"),
    ],
)
def test_a_later_training_in_the_folder_has_a_price_where_only_the_objective_differs(
    run, caplog, given, why
):
    price = plain_loss(fitted(make(run, **given)))
    assert (price is None) == (why is not None)
    assert why is None or f"is not compared with: it had {why}." in caplog.text


def test_an_untrained_model_has_the_price_of_the_run_whose_weights_it_has(run, tmp_path):
    assert plain_loss(make(run)) is None  # which is no model of this run

    peft = pytest.importorskip("peft")
    trainer = make(tmp_path, adapted())
    trainer.train_with_plain()
    trainer.save_model()
    expected = plain_loss(trainer)
    later = make(tmp_path, peft.PeftModel.from_pretrained(bert(), str(tmp_path)))
    assert expected is not None and plain_loss(later) == pytest.approx(expected)
    other_base = make(tmp_path, peft.PeftModel.from_pretrained(bert(seed=1), str(tmp_path)))
    assert plain_loss(other_base) is None


def tripled(outputs, labels, num_items_in_batch=None):
    return 3 * nn.functional.cross_entropy(outputs.logits, labels)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"readout": last_token}, id="readout"),
        pytest.param({"compute_loss_func": tripled}, id="loss"),
        pytest.param({"label_smoothing_factor": 0.5}, id="smoothing"),
    ],
)
def test_a_saved_run_is_no_reference_for_what_reads_or_scores_its_model_in_another_way(
    run, caplog, other
):
    def price(compute_loss_func=None, **given):
        model = BertForSequenceClassification.from_pretrained(run)
        trainer = make(run, model, **given)
        trainer.compute_loss_func = compute_loss_func
        trainer.evaluate()
        return trainer._run.record.certificate.price

    assert price().plain is not None and price().references
    assert price(**other).plain is None and not price(**other).references
    assert "_plain is not compared with: it had another " in caplog.text


def test_a_resumed_training_is_compared_with_the_plain_run_of_its_own_start(tmp_path):
    """A model whose head was drawn without a seed is another one in each process."""
    saves = {"save_strategy": "steps", "save_steps": 1}
    make(tmp_path, **saves).train_with_plain()
    again = make(tmp_path, bert(seed=1), **saves)
    again.train(resume_from_checkpoint=True)
    assert plain_loss(again) is not None


def test_a_stream_is_known_while_it_is_there(tmp_path, caplog):
    saves = {"save_strategy": "steps", "save_steps": 1}
    trainer = make(tmp_path, rows=Stream(ROWS), **saves)
    trainer.train_with_plain()
    trainer.save_model()
    expected = plain_loss(trainer)
    assert expected is not None

    # Of another training on a stream nobody knows what it gives; of one that is resumed it is taken on trust.
    assert plain_loss(fitted(make(tmp_path, rows=Stream(ROWS)))) is None
    assert "whether it had other training examples is not known" in caplog.text
    resumed = make(tmp_path, rows=Stream(ROWS), **saves)
    resumed.train(resume_from_checkpoint=True)
    assert plain_loss(resumed) == pytest.approx(expected)


def test_rows_that_are_others_each_time_are_not_taken_for_the_same(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        generator = torch.Generator().manual_seed(0)

        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            return {**ROWS[index], "labels": torch.randint(3, (), generator=self.generator)}

    origins = [origin_of(make(tmp_path, rows=rows), None) for rows in (Noisy(), Noisy())]
    assert origins[0]["rows"] != origins[1]["rows"]


def test_of_a_run_of_an_earlier_version_the_log_says_why_it_is_not_compared(tmp_path, caplog):
    trainer = make(tmp_path)
    trainer.train_with_plain()
    path = tmp_path / "_plain" / "descent_config.json"
    summary = json.loads(path.read_text())
    del summary["origin"]
    path.write_text(json.dumps(summary))
    caplog.set_level(logging.WARNING)
    assert trainer.evaluate_layers().certificate().price.plain is None
    assert "started from was not recorded, as in earlier versions" in caplog.text
