"""Multipliers that move on rows held out of training."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny.data import Stream, batches, classification_data
from tiny.models import bert
from tiny.oracles import assert_equal_runs, naive_layer_losses
from tiny.sft import TOKENIZER, texts
from tiny.sft import llama as tuned_llama
from tiny.tokenizers import word_tokenizer
from tiny.training import config, trained
from torch.utils.data import Subset
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from hf_descent import (
    DescentTrainer,
    Seq2SeqDescentConfig,
    Seq2SeqDescentTrainer,
    SFTDescentConfig,
    SFTDescentTrainer,
)
from hf_descent.constraints.state import DUAL_EVERY
from hf_descent.runs import RunFolder
from hf_descent.training.holdout import shuffled


DATA = classification_data(420)
TRAIN = DATA[:210]
HELD_OUT = DATA[210:]
FRESH = classification_data(300, seed=1)


def summary_of(trainer):
    trainer.save_model()
    return RunFolder(trainer.args.output_dir).summary


def key(ids):
    return tuple(ids.tolist())


def plain(rows):
    """Lists of numbers, as `datasets` keeps them."""
    return Dataset.from_list(
        [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in rows]
    )


def test_held_out_rows_are_not_trained_on_and_cost_one_forward_in_several_steps(tmp_path):
    calls = []
    model = bert()
    model.register_forward_pre_hook(
        lambda module, args, given: calls.append(
            (module.training, torch.is_grad_enabled(), given["input_ids"])
        ),
        with_kwargs=True,
    )
    args = config(tmp_path, per_device_train_batch_size=42, max_steps=5 * DUAL_EVERY)
    DescentTrainer(model, args, train_dataset=TRAIN, dual_dataset=HELD_OUT).train()
    calls = calls[
        [is_training for is_training, *_ in calls].index(True) :
    ]  # the first ones look for the layers
    rows = {True: [], False: []}

    for is_training, has_gradient, ids in calls:
        assert is_training == has_gradient
        rows[is_training].append([key(row) for row in ids])

    assert len(rows[True]) == 5 * DUAL_EVERY and len(rows[False]) == 5

    trained, held_out = ({row for batch in rows[mode] for row in batch} for mode in (True, False))

    assert trained == {key(row["input_ids"]) for row in TRAIN}
    assert held_out == {key(row["input_ids"]) for row in HELD_OUT}  # each turn reads other rows


@pytest.mark.slow
def test_held_out_rows_cost_less_than_a_twentieth_of_a_step(tmp_path):
    """By the floating-point operations of 16 steps, without what a run does once."""

    def operations(steps, dual_dataset):
        args = config(tmp_path, max_steps=steps)
        given = {"train_dataset": TRAIN, "dual_dataset": dual_dataset}
        with FlopCounterMode(display=False) as counter:
            DescentTrainer(bert(num_layers=6), args, **given).train()
        return counter.get_total_flops()

    plain, held_out = (
        operations(3 * DUAL_EVERY, rows) - operations(DUAL_EVERY, rows) for rows in (None, HELD_OUT)
    )
    assert 1.02 < held_out / plain < 1.05


class NaiveDuals(TrainerCallback):
    """Plain projected ascent on the held-out losses of BERT, by its hidden states, once in several steps."""

    def __init__(self, rows, alpha, rate):
        self.rows = rows
        self.alpha = alpha
        self.rate = rate
        self.values = np.zeros(3)
        self.average = np.zeros(3)
        self.weight = 0.0
        self.turn = 0

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step % 8:
            return
        rows = [
            self.rows[index % len(self.rows)] for index in range(self.turn * 8, self.turn * 8 + 8)
        ]
        self.turn += 1

        with torch.no_grad():
            losses = naive_layer_losses(model.eval(), next(batches(rows))).double().numpy()

        decay = 0.98**8
        self.average = decay * self.average + (1 - decay) * losses
        self.weight = decay * self.weight + 1 - decay
        violations = losses - (1 - self.alpha) * np.array([1.0, *losses[:-1]])

        for _ in range(8):
            self.values = np.maximum(self.values + self.rate * violations, 0)


def test_multipliers_and_averages_are_those_of_a_naive_loop(tmp_path):
    args = config(
        tmp_path, max_steps=30, dual_optim="sgd", descent_alpha=0.1,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, noise_gamma=0.0,
    )  # fmt: skip
    naive = NaiveDuals(shuffled(HELD_OUT, args), 0.1, 0.02)
    given = {"train_dataset": TRAIN, "dual_dataset": HELD_OUT, "callbacks": [naive]}
    trainer = trained(bert(dropout=0.3), args, **given)

    assert naive.turn == 4 and naive.values.max() > 0.01
    assert trainer.multipliers.values.tolist() == pytest.approx(naive.values.tolist(), abs=1e-6)

    logged = trainer.state.log_history[-2]
    average = naive.average / naive.weight
    violations = average - 0.9 * np.array([1.0, *average[:-1]])

    assert [logged[f"violation_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
        violations.tolist(), abs=1e-5
    )
    assert logged["layer_loss_3"] == logged["loss"]  # of training

    trainer.save_model()
    summary = RunFolder(args.output_dir).summary

    assert summary["dual_rows"] == summary["train_rows"] == 210
    assert summary["dual_layer_losses"] == pytest.approx(average.tolist(), rel=1e-5)


def test_columns_that_the_model_does_not_take_are_dropped_and_the_card_tells_the_parts(tmp_path):
    args = config(tmp_path, max_steps=2)
    given = plain(HELD_OUT).add_column("text", ["w1"] * 210)
    collate = DataCollatorWithPadding(word_tokenizer())
    trainer = DescentTrainer(
        bert(), args, train_dataset=plain(TRAIN), dual_dataset=given, data_collator=collate
    )
    trainer.train()
    summary = summary_of(trainer)

    assert (summary["train_rows"], summary["dual_rows"]) == (210, 210)
    assert summary["dual_source"] == "dual_dataset"

    trainer.evaluate(classification_data(80, seed=1))
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()

    assert "| trained the weights | 210 |" in card
    assert "| moved the multipliers | 210 (a data set of their own) |" in card
    assert "| evaluated in training, to choose by | none |" in card


@pytest.mark.parametrize(("rows", "told"), [
    (DATA, "has rows of `train_dataset`"),
    (DATA[:200], "has rows of `train_dataset`"),
    (Subset(DATA, range(200)), "has rows of `train_dataset`"),
    (FRESH, "has rows of `second`"),
    (HELD_OUT[:199], "has 199 rows"),
    (Stream(iter(DATA)), "has no known number"),
])  # fmt: skip
def test_rows_that_cannot_move_the_multipliers_are_refused(tmp_path, rows, told):
    sets = {"first": HELD_OUT[:9], "second": FRESH[:9]}
    given = {"train_dataset": DATA[:300], "eval_dataset": sets, "dual_dataset": rows}
    trainer = DescentTrainer(bert(), config(tmp_path, max_steps=1), **given)
    with pytest.raises(ValueError, match=f"`dual_dataset` {told}"):
        trainer.train()
    assert trainer.state.global_step == 0


def classifier(args):
    return DescentTrainer(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)


def translator(args):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 3,
        "num_heads": 2,
    }
    model = T5ForConditionalGeneration(
        T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
    )
    ids = [row["input_ids"].tolist() for row in DATA]
    rows = [{"input_ids": row, "labels": row[: 3 + index % 5]} for index, row in enumerate(ids)]
    args = Seq2SeqDescentConfig.from_training_arguments(args)
    collate = DataCollatorForSeq2Seq(word_tokenizer(), model)
    return Seq2SeqDescentTrainer(model, args, collate, rows[:210], dual_dataset=rows[210:])


def packed_tuner(args):
    args = SFTDescentConfig.from_training_arguments(
        args, max_length=12, packing=True, eval_packing=False
    )
    data = Dataset.from_dict({"text": texts(500)})
    trainer = SFTDescentTrainer(tuned_llama(), args, train_dataset=data, processing_class=TOKENIZER)
    packed = trainer.train_dataset  # as the rows of the multipliers have to be, too
    half = len(packed) // 2
    return SFTDescentTrainer(
        tuned_llama(),
        args,
        train_dataset=packed.select(range(half)),
        dual_dataset=packed.select(range(half, 2 * half)),
        processing_class=TOKENIZER,
    )


@pytest.mark.parametrize("make", [classifier, translator, packed_tuner])
def test_what_moves_the_multipliers_is_the_evaluation_of_their_rows(tmp_path, make):
    """Of a model that does not learn, and turns that take all of the rows."""
    trainer = make(config(tmp_path, learning_rate=0.0, max_steps=1))
    held_out = trainer._dual_dataset
    trainer.args.per_device_train_batch_size = len(held_out)
    trainer.train()

    assert len(held_out) >= 200

    found = summary_of(trainer)["dual_layer_losses"]
    if isinstance(held_out, Dataset):
        assert trainer.padding_free
    metrics = trainer.evaluate(held_out)
    layers = range(1, len(found) + 1)

    assert found == pytest.approx(
        [metrics[f"eval_layer_loss_{layer}"] for layer in layers], rel=1e-5
    )


def test_held_out_rows_are_read_in_batches_of_the_size_that_was_found(tmp_path, monkeypatch):
    trainer = classifier(config(tmp_path, auto_find_batch_size=True))
    sizes = []
    forward = trainer.model.forward

    def limited(input_ids, **inputs):
        if len(input_ids) > 4:
            raise RuntimeError("CUDA out of memory.")
        sizes.append(len(input_ids))
        return forward(input_ids=input_ids, **inputs)

    monkeypatch.setattr(trainer.model, "forward", limited)
    trainer.train()
    assert trainer.state.global_step == 6 and max(sizes) == 4


def test_resumed_equals_straight(tmp_path):
    settings = {
        "max_steps": 27, "noise_gamma": 0.4, "save_strategy": "steps", "save_steps": 11,
        "descent_alpha": "line", "initial_loss_bound": "auto", "dual_warmup_steps": 10, "loss_targets": {1: 0.1},
    }  # fmt: skip
    runs = []

    for checkpoint in (None, str(tmp_path / "checkpoint-11")):
        given = {"train_dataset": TRAIN, "dual_dataset": HELD_OUT}
        trainer = DescentTrainer(bert(dropout=0.2), config(tmp_path, **settings), **given)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(trainer)

    straight, resumed = runs

    assert straight.multipliers.values.any()

    assert_equal_runs(straight, resumed)

    assert summary_of(straight)["dual_layer_losses"] == summary_of(resumed)["dual_layer_losses"]


def test_the_order_of_the_rows_depends_on_the_seed_of_the_data_alone(tmp_path):
    first, same, other = (
        shuffled(HELD_OUT, config(tmp_path, **seeds)).indices
        for seeds in ({"seed": 1}, {"seed": 2, "data_seed": 1}, {"seed": 2})
    )
    assert first == same != other


def test_the_noise_of_training_acts_on_held_out_rows(tmp_path):
    found = []
    for gamma in (0.0, 3.0):
        args = config(tmp_path, noise_gamma=gamma, learning_rate=0.0, max_steps=1)
        trainer = trained(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)
        found.append(summary_of(trainer)["dual_layer_losses"])
    assert found[0] != pytest.approx(found[1], rel=1e-4)


def test_micro_batches_of_held_out_rows_have_noise_of_their_own(tmp_path):
    model = bert()
    read = []
    model.bert.encoder.layer[0].register_forward_pre_hook(
        lambda layer, args: None if layer.training else read.append(args[0])
    )
    args = config(tmp_path, noise_gamma=[0.5, 1.0], gradient_accumulation_steps=2, max_steps=1)
    trained(model, args, train_dataset=DATA, dual_dataset=FRESH[:1] * 200)
    first, second = read[-2:]  # the same row eight times each, but for its noise
    differences = (first[:, None] - second[None]).abs().sum(dim=(2, 3))  # [rows, rows]
    assert differences.shape == (8, 8) and differences.min() > 1


def test_a_share_of_the_training_rows_is_no_longer_an_option(tmp_path):
    assert config(tmp_path, dual_holdout=None).dual_holdout is None  # as saved settings have it
    with pytest.raises(ValueError, match="`dual_holdout` is 0.05, .* `dual_dataset=`"):
        config(tmp_path, dual_holdout=0.05)
    args = config(tmp_path)
    args.dual_holdout = 0.05
    with pytest.raises(ValueError, match="`dual_holdout` is 0.05"):
        DescentTrainer(bert(), args, train_dataset=DATA).train()


def test_objectives_without_multipliers_leave_their_rows_alone(tmp_path):
    for objective in ("erm", "deep_supervision"):
        args = config(tmp_path, objective=objective, max_steps=1)
        trainer = trained(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)
        assert "dual_rows" not in summary_of(trainer)
