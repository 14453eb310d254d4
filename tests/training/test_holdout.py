"""Multipliers that move on rows held out of training."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny.data import Stream, batches, classification_data
from tiny.models import VOCAB, bert
from tiny.oracles import assert_equal_runs, naive_layer_losses
from tiny.sft import TOKENIZER, texts
from tiny.sft import llama as tuned_llama
from tiny.tokenizers import word_tokenizer
from tiny.training import config, fitted, trained
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


def layer_losses_of(metrics):
    layers = range(1, 4)
    return [metrics[f"eval_layer_loss_{layer}"] for layer in layers]


def plain(rows):
    """Lists of numbers, as `datasets` keeps them."""
    lists = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in rows]
    return Dataset.from_list(lists)


# ---- which rows are read, and when ----


def ids_of(rows):
    return {tuple(row["input_ids"].tolist()) for row in rows}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Of each call of the model from its first training step on: whether it trains, has gradients, and its ids."""
    calls = []

    def note(model, args, inputs):
        ids = {tuple(row.tolist()) for row in inputs["input_ids"]}
        calls.append((model.training, torch.is_grad_enabled(), ids))

    model = bert()
    model.register_forward_pre_hook(note, with_kwargs=True)
    args = config(
        tmp_path_factory.mktemp("calls"), per_device_train_batch_size=42, max_steps=5 * DUAL_EVERY
    )
    DescentTrainer(model, args, train_dataset=TRAIN, dual_dataset=HELD_OUT).train()

    first_step = [modes for *modes, _ in calls].index([True, True])
    return calls[first_step:]


def test_rows_that_move_the_multipliers_are_not_trained_on(calls):
    trained_on = [ids for is_training, _, ids in calls if is_training]
    assert set().union(*trained_on) == ids_of(TRAIN)


def test_each_turn_reads_other_rows_that_move_the_multipliers(calls):
    held_out = [ids for is_training, _, ids in calls if not is_training]
    assert set().union(*held_out) == ids_of(HELD_OUT)


def test_rows_that_move_the_multipliers_cost_one_forward_in_several_steps(calls):
    modes = [(is_training, has_gradients) for is_training, has_gradients, _ in calls]
    assert modes.count((True, True)) == 5 * DUAL_EVERY
    assert modes.count((False, False)) == 5
    assert len(modes) == 5 * DUAL_EVERY + 5


@pytest.mark.slow
def test_held_out_rows_cost_less_than_a_twentieth_of_a_step(tmp_path):
    def operations(steps, dual_dataset):
        args = config(tmp_path, max_steps=steps)
        trainer = DescentTrainer(
            bert(num_layers=6), args, train_dataset=TRAIN, dual_dataset=dual_dataset
        )
        with FlopCounterMode(display=False) as counter:
            trainer.train()
        return counter.get_total_flops()

    def operations_of_steps(dual_dataset):
        """Without what a run does once."""
        return operations(3 * DUAL_EVERY, dual_dataset) - operations(DUAL_EVERY, dual_dataset)

    assert 1.02 < operations_of_steps(HELD_OUT) / operations_of_steps(None) < 1.05


def test_the_order_of_the_rows_depends_on_the_seed_of_the_data_alone(tmp_path):
    def order(**seeds):
        return shuffled(HELD_OUT, config(tmp_path, **seeds)).indices

    assert order(seed=1) == order(seed=2, data_seed=1)
    assert order(seed=1) != order(seed=2)


def test_held_out_rows_are_read_in_batches_of_the_size_that_was_found(tmp_path, monkeypatch):
    trainer = classifier(config(tmp_path, auto_find_batch_size=True))
    sizes = []
    forward = trainer.model.forward

    def limited(input_ids, **inputs):
        if len(input_ids) > 7:
            raise RuntimeError("CUDA out of memory.")
        sizes.append(len(input_ids))
        return forward(input_ids=input_ids, **inputs)

    monkeypatch.setattr(trainer.model, "forward", limited)
    trainer.train()
    assert trainer.state.global_step == 6
    assert max(sizes) == 7


def test_objectives_without_multipliers_leave_their_rows_alone(tmp_path):
    for objective in ("erm", "deep_supervision"):
        args = config(tmp_path, objective=objective, max_steps=1)
        trainer = trained(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)
        assert "dual_rows" not in summary_of(trainer)


# ---- what they do to the multipliers ----


class NaiveDuals(TrainerCallback):
    """Plain projected ascent on the held-out losses of BERT, by its hidden states, once in several steps.

    Attributes:
        values, average (array `[3]`): multipliers, and losses of the layers with the newest counting most.
    """

    EVERY = 8  # steps, and as many steps of ascent at once
    BATCH = 8

    def __init__(self, rows, alpha, rate):
        self.rows = rows
        self.alpha = alpha
        self.rate = rate
        self.values = np.zeros(3)
        self.sums = np.zeros(3)
        self.weight = 0.0
        self.turn = 0

    @property
    def average(self):
        return self.sums / self.weight

    def violations(self, losses):
        below = np.array([1.0, *losses[:-1]])
        return losses - (1 - self.alpha) * below

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.EVERY:
            return
        first = self.turn * self.BATCH
        rows = [self.rows[index % len(self.rows)] for index in range(first, first + self.BATCH)]
        self.turn += 1

        with torch.no_grad():
            losses = naive_layer_losses(model.eval(), next(batches(rows))).double().numpy()

        decay = 0.98**self.EVERY
        self.sums = decay * self.sums + (1 - decay) * losses
        self.weight = decay * self.weight + 1 - decay
        for _ in range(self.EVERY):
            self.values = np.maximum(self.values + self.rate * self.violations(losses), 0)


@pytest.fixture(scope="module")
def beside_naive(tmp_path_factory):
    """A training with rows of its own for the multipliers, and a naive loop that looks on."""
    args = config(
        tmp_path_factory.mktemp("naive"),
        max_steps=30,
        dual_optim="sgd",
        descent_alpha=0.1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        noise_gamma=0.0,
    )
    naive = NaiveDuals(shuffled(HELD_OUT, args), alpha=0.1, rate=0.02)
    model = bert(dropout=0.3)
    trainer = trained(model, args, train_dataset=TRAIN, dual_dataset=HELD_OUT, callbacks=[naive])
    assert naive.turn == 4
    return trainer, naive


def test_multipliers_are_those_of_a_naive_loop(beside_naive):
    trainer, naive = beside_naive
    assert naive.values.max() > 0.01
    assert trainer.multipliers.values.tolist() == pytest.approx(naive.values.tolist(), abs=1e-6)


def test_violations_are_logged_of_the_rows_that_move_the_multipliers(beside_naive):
    trainer, naive = beside_naive
    logged = trainer.state.log_history[-2]
    violations = [logged[f"violation_{layer}"] for layer in (1, 2, 3)]
    expected = naive.violations(naive.average)
    assert violations == pytest.approx(expected.tolist(), abs=1e-5)


def test_losses_are_logged_of_the_training_rows(beside_naive):
    trainer, _ = beside_naive
    logged = trainer.state.log_history[-2]
    assert logged["layer_loss_3"] == logged["loss"]


def test_a_run_says_how_many_rows_each_part_has_and_what_the_multipliers_saw(beside_naive):
    trainer, naive = beside_naive
    summary = summary_of(trainer)
    assert summary["dual_rows"] == summary["train_rows"] == 210
    assert summary["dual_layer_losses"] == pytest.approx(naive.average.tolist(), rel=1e-5)


def test_columns_that_the_model_does_not_take_are_dropped(tmp_path):
    rows = plain(HELD_OUT).add_column("text", ["w1"] * 210)
    trainer = trained(
        bert(),
        config(tmp_path, max_steps=2),
        train_dataset=plain(TRAIN),
        dual_dataset=rows,
        data_collator=DataCollatorWithPadding(word_tokenizer()),
    )
    assert summary_of(trainer)["dual_rows"] == 210


def test_a_card_tells_the_parts_of_the_data(tmp_path):
    args = config(tmp_path, max_steps=2)
    trainer = trained(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)
    assert summary_of(trainer)["dual_source"] == "dual_dataset"

    trainer.evaluate(classification_data(80, seed=1))
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "| trained the weights | 210 |" in card
    assert "| moved the multipliers | 210 (a data set of their own) |" in card
    assert "| evaluated in training, to choose by | none |" in card


# ---- what is refused ----


@pytest.mark.parametrize(("rows", "told"), [
    (DATA, "has examples of `train_dataset`"),
    (DATA[:200], "has examples of `train_dataset`"),
    (Subset(DATA, range(200)), "has examples of `train_dataset`"),
    (FRESH, "has examples of `second`"),
    (HELD_OUT[:199], "has 199 examples"),
    (Stream(iter(DATA)), "has no known number"),
])  # fmt: skip
def test_rows_that_cannot_move_the_multipliers_are_refused(tmp_path, rows, told):
    trainer = DescentTrainer(
        bert(),
        config(tmp_path, max_steps=1),
        train_dataset=DATA[:300],
        eval_dataset={"first": HELD_OUT[:9], "second": FRESH[:9]},
        dual_dataset=rows,
    )
    with pytest.raises(ValueError, match=f"`dual_dataset` {told}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_share_of_the_training_rows_is_no_longer_an_option(tmp_path):
    with pytest.raises(ValueError, match="`dual_holdout` is 0.05, .* `dual_dataset=`"):
        config(tmp_path, dual_holdout=0.05)


def test_a_share_that_is_set_later_is_refused_when_training_starts(tmp_path):
    args = config(tmp_path)
    args.dual_holdout = 0.05
    with pytest.raises(ValueError, match="`dual_holdout` is 0.05"):
        DescentTrainer(bert(), args, train_dataset=DATA).train()


def test_settings_of_earlier_runs_that_had_no_share_are_taken(tmp_path):
    assert config(tmp_path, dual_holdout=None).dual_holdout is None


# ---- every kind of trainer ----


def classifier(args):
    return DescentTrainer(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)


def translator(args):
    torch.manual_seed(0)
    model_config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(model_config)
    rows = []
    for index, row in enumerate(DATA):
        ids = row["input_ids"].tolist()
        rows.append({"input_ids": ids, "labels": ids[: 3 + index % 5]})
    args = Seq2SeqDescentConfig.from_training_arguments(args)
    collate = DataCollatorForSeq2Seq(word_tokenizer(), model)
    return Seq2SeqDescentTrainer(model, args, collate, rows[:210], dual_dataset=rows[210:])


def packed_tuner(args):
    """A trainer whose rows are packed, as those of the multipliers have to be."""
    args = SFTDescentConfig.from_training_arguments(
        args, max_length=12, packing=True, eval_packing=False
    )

    def make(train_dataset, **keywords):
        return SFTDescentTrainer(
            tuned_llama(),
            args,
            train_dataset=train_dataset,
            processing_class=TOKENIZER,
            **keywords,
        )

    packed = make(Dataset.from_dict({"text": texts(500)})).train_dataset
    half = len(packed) // 2
    held_out = packed.select(range(half, 2 * half))
    return make(packed.select(range(half)), dual_dataset=held_out)


@pytest.mark.parametrize("make", [classifier, translator, packed_tuner])
def test_what_moves_the_multipliers_is_the_evaluation_of_their_rows(tmp_path, make):
    """Of a model that does not learn, and turns that take all of the rows."""
    trainer = make(config(tmp_path, learning_rate=0.0, max_steps=1))
    held_out = trainer._dual_dataset
    assert len(held_out) >= 200
    if make is packed_tuner:
        assert trainer.padding_free

    trainer.args.per_device_train_batch_size = len(held_out)
    trainer.train()
    found = summary_of(trainer)["dual_layer_losses"]
    assert found == pytest.approx(layer_losses_of(trainer.evaluate(held_out)), rel=1e-5)


def test_resumed_equals_straight(tmp_path):
    def run(checkpoint=None):
        args = config(
            tmp_path,
            max_steps=27,
            save_strategy="steps",
            save_steps=11,
            noise_gamma=0.4,
            descent_alpha="line",
            initial_loss_bound="auto",
            dual_warmup_steps=10,
            loss_targets={1: 0.1},
        )
        trainer = DescentTrainer(
            bert(dropout=0.2), args, train_dataset=TRAIN, dual_dataset=HELD_OUT
        )
        return fitted(trainer, checkpoint)

    straight = run()
    resumed = run(str(tmp_path / "checkpoint-11"))
    assert straight.multipliers.values.any()
    assert_equal_runs(straight, resumed)
    assert summary_of(straight)["dual_layer_losses"] == summary_of(resumed)["dual_layer_losses"]


# ---- noise ----


def test_the_noise_of_training_acts_on_held_out_rows(tmp_path):
    def held_out_losses(gamma):
        args = config(tmp_path, noise_gamma=gamma, learning_rate=0.0, max_steps=1)
        trainer = trained(bert(), args, train_dataset=TRAIN, dual_dataset=HELD_OUT)
        return summary_of(trainer)["dual_layer_losses"]

    assert held_out_losses(0.0) != pytest.approx(held_out_losses(3.0), rel=1e-4)


def test_micro_batches_of_held_out_rows_have_noise_of_their_own(tmp_path):
    model = bert()
    read = []

    def note(layer, args):
        if not layer.training:
            read.append(args[0])

    model.bert.encoder.layer[0].register_forward_pre_hook(note)
    args = config(tmp_path, noise_gamma=[0.5, 1.0], gradient_accumulation_steps=2, max_steps=1)
    trained(model, args, train_dataset=DATA, dual_dataset=FRESH[:1] * 200)

    first, second = read[-2:]  # the same row eight times each, but for its noise
    differences = (first[:, None] - second[None]).abs().sum(dim=(2, 3))  # [rows, rows]
    assert differences.shape == (8, 8)
    assert differences.min() > 1
