"""Multipliers that move on rows held out of training."""

import numpy as np
import pytest
import torch
from datasets import Array3D, Dataset, Features, Image, List, Value
from noisy import vit
from tiny import (
    VOCAB,
    Stream,
    assert_equal_runs,
    batches,
    bert,
    classification_data,
    config,
    language_data,
    llama,
    naive_layer_losses,
    spread,
    trained,
    word_tokenizer,
)
from tiny_sft import TOKENIZER, texts
from tiny_sft import llama as tuned_llama
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    default_data_collator,
)

from hf_descent import (
    DescentObjective,
    DescentProblem,
    DescentTrainer,
    Seq2SeqDescentConfig,
    Seq2SeqDescentTrainer,
    SFTDescentConfig,
    SFTDescentTrainer,
)
from hf_descent.configs import DescentArguments
from hf_descent.constraints.state import DUAL_EVERY
from hf_descent.evaluation import LayerProfile
from hf_descent.losses.layerwise import find_layer_losses
from hf_descent.losses.task import TaskLoss
from hf_descent.runs import RunFolder
from hf_descent.training.holdout import row_keys, split


DATA = classification_data(420)


def summary_of(trainer):
    trainer.save_model()
    return RunFolder(trainer.args.output_dir).summary


def key(ids):
    return tuple(ids.tolist())


def test_held_out_rows_are_not_trained_on_and_cost_one_forward_in_several_steps(tmp_path):
    calls = []
    model = bert()
    model.register_forward_pre_hook(
        lambda module, args, given: calls.append(
            (module.training, torch.is_grad_enabled(), given["input_ids"])
        ),
        with_kwargs=True,
    )
    args = config(
        tmp_path, dual_holdout=0.5, per_device_train_batch_size=42, max_steps=5 * DUAL_EVERY
    )
    DescentTrainer(model, args, train_dataset=DATA).train()
    calls = calls[
        [is_training for is_training, *_ in calls].index(True) :
    ]  # the first ones look for the layers
    rows = {True: [], False: []}
    for is_training, has_gradient, ids in calls:
        assert is_training == has_gradient
        rows[is_training].append([key(row) for row in ids])
    assert len(rows[True]) == 5 * DUAL_EVERY and len(rows[False]) == 5
    trained, held_out = ({row for batch in rows[mode] for row in batch} for mode in (True, False))
    assert (
        not trained & held_out and len(trained) == len(held_out) == 210
    )  # each turn reads other rows
    assert trained | held_out == {key(row["input_ids"]) for row in DATA}


def test_a_data_loader_of_ones_own_may_not_train_on_held_out_rows(tmp_path):
    class Own(DescentTrainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(DataLoader(DATA, 42, collate_fn=default_data_collator))

    trainer = Own(bert(), config(tmp_path, dual_holdout=0.5, max_steps=2), train_dataset=DATA)
    with pytest.raises(
        ValueError,
        match="`dual_holdout` needs Trainer's own `get_train_dataloader`: give `dual_dat",
    ):
        trainer.train()


@pytest.mark.slow
def test_held_out_rows_cost_less_than_a_twentieth_of_a_step(tmp_path):
    """By the floating-point operations of 16 steps, without what a run does once."""

    def operations(steps, share):
        args = config(tmp_path, dual_holdout=share, max_steps=steps)
        with FlopCounterMode(display=False) as counter:
            DescentTrainer(bert(num_layers=6), args, train_dataset=DATA).train()
        return counter.get_total_flops()

    plain, held_out = (
        operations(3 * DUAL_EVERY, share) - operations(DUAL_EVERY, share) for share in (None, 0.5)
    )
    assert 1.02 < held_out / plain < 1.05


class NaiveDuals(TrainerCallback):
    """Plain projected ascent on the held-out losses of BERT, by its hidden states, once in several steps."""

    def __init__(self, rows, alpha, rate):
        self.rows, self.alpha, self.rate = rows, alpha, rate
        self.values, self.average, self.weight, self.turn = np.zeros(3), np.zeros(3), 0.0, 0

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
        self.average, self.weight = (
            decay * self.average + (1 - decay) * losses,
            decay * self.weight + 1 - decay,
        )
        violations = losses - (1 - self.alpha) * np.array([1.0, *losses[:-1]])
        for _ in range(8):
            self.values = np.maximum(self.values + self.rate * violations, 0)


def test_multipliers_and_averages_are_those_of_a_naive_loop(tmp_path):
    args = config(
        tmp_path, dual_holdout=0.5, max_steps=30, dual_optim="sgd", descent_alpha=0.1,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, noise_gamma=0.0,
    )  # fmt: skip
    _, held_out = split(DATA, args)
    naive = NaiveDuals(held_out, 0.1, 0.02)
    trainer = trained(bert(dropout=0.3), args, train_dataset=DATA, callbacks=[naive])
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


def test_rows_of_their_own_act_as_rows_held_out(tmp_path):
    settings = {
        "max_steps": 20,
        "initial_loss_bound": 0.8,
        "save_strategy": "steps",
        "save_steps": 11,
    }
    args = config(tmp_path / "share", dual_holdout=0.5, **settings)
    share = DescentTrainer(bert(), args, train_dataset=DATA)
    share.train()
    trained, held_out = split(DATA, args)
    # They are read in random order, and columns that the model does not take are dropped.
    order = np.argsort(np.random.default_rng(args.seed).permutation(210))
    given = plain([held_out[row] for row in order]).add_column("text", ["w1"] * 210)
    collate = DataCollatorWithPadding(word_tokenizer())
    for resumed in (None, True):
        args = config(tmp_path / "own", **settings)
        own = DescentTrainer(
            bert(), args, train_dataset=trained, dual_dataset=given, data_collator=collate
        )
        own.train(resume_from_checkpoint=resumed and str(tmp_path / "own" / "checkpoint-11"))
        assert own.multipliers.values.any()
        assert_equal_runs(own, share)
    summaries = [summary_of(trainer) for trainer in (share, own)]
    assert [(each["train_rows"], each["dual_rows"]) for each in summaries] == [(210, 210)] * 2
    assert [each["dual_source"] for each in summaries] == ["dual_holdout", "dual_dataset"]
    own.evaluate(classification_data(80, seed=1))
    own.create_model_card()
    card = (tmp_path / "own" / "README.md").read_text()
    assert "| trained the weights | 210 |" in card
    assert "| moved the multipliers | 210 (a data set of their own) |" in card
    assert "| evaluated in training, to choose by | none |" in card


@pytest.mark.parametrize(("given", "told"), [
    ({"dual_dataset": DATA}, "`train_dataset`"),
    ({"dual_dataset": list(DATA)[:199]}, "199 rows"),
    ({"dual_dataset": Stream(iter(DATA))}, "no known number"),
    ({"dual_dataset": list(DATA), "dual_holdout": 0.5}, "not both"),
])  # fmt: skip
def test_rows_of_their_own_that_cannot_serve_are_refused(tmp_path, given, told):
    args = config(tmp_path, dual_holdout=given.pop("dual_holdout", None), max_steps=1)
    with pytest.raises(ValueError, match=f"`dual_dataset`.*{told}"):
        DescentTrainer(bert(), args, train_dataset=DATA, **given).train()


def plain(rows):
    """Lists of numbers, as `datasets` keeps them."""
    return Dataset.from_list(
        [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in rows]
    )


FRESH = classification_data(300, seed=1)


@pytest.mark.parametrize(("part", "kind"), [("train", list), ("train", plain), ("second", plain)])
def test_rows_of_their_own_may_not_be_in_another_part_but_for_a_few_duplicates(
    tmp_path, part, kind
):
    for shared in (3, 4):  # of 300 rows 1 % are let through
        rows = DATA[:shared] + FRESH[shared:]
        sets = {
            "first": classification_data(9, seed=2),
            "second": plain(DATA[100:] + rows[:shared]),
        }
        given = {
            "train_dataset": DATA if part == "train" else classification_data(99, seed=3),
            "eval_dataset": sets,
        }
        trainer = DescentTrainer(
            bert(), config(tmp_path, max_steps=1), dual_dataset=kind(rows), **given
        )
        if shared == 3:
            trainer.train()
            continue
        name = "train_dataset" if part == "train" else "second"
        with pytest.raises(ValueError, match=rf"`dual_dataset` has rows of `{name}` \(1.3%"):
            trainer.train()
        assert trainer.state.global_step == 0


def test_evaluation_rows_that_were_trained_on_are_counted(tmp_path, caplog):
    chosen = plain(DATA[:7] + FRESH[:13])
    trainer = trained(
        bert(),
        config(tmp_path, max_steps=1),
        train_dataset=plain(DATA),
        eval_dataset=chosen,
        dual_dataset=FRESH[20:],
    )
    told = [
        record.getMessage() for record in caplog.records if "are fitted to" in record.getMessage()
    ]
    assert len(told) == 1 and "7 of 20 rows of `eval_dataset` (35.0%)" in told[0]
    caplog.clear()
    trainer.evaluate(FRESH[:20])
    assert "are fitted to" not in caplog.text
    assert not trainer._run.record.certificate.also_selected
    trainer.predict(chosen)
    assert trainer._run.record.certificate.also_selected
    before = trainer._run.record.certificate
    trainer.predict(
        [{name: value for name, value in row.items() if name != "labels"} for row in FRESH]
    )
    assert trainer._run.record.certificate is before  # such rows say nothing
    for measure in (trainer.evaluate, trainer.evaluate_layers):
        caplog.clear()
        measure(DATA[:1] + FRESH[:29])
        assert (
            "10 of 30 rows of `eval_dataset`" in caplog.text
        )  # one of training, and nine that moved the multipliers
        assert trainer._run.record.certificate.also_selected
        measure()
        assert trainer._run.record.certificate.also_selected


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
                name: trainer.evaluate(name) | {"f_0": trainer.problem.initial_loss_bound}
                for name in names
            }
        )
    for name, other in (("balanced", "skewed"), ("skewed", "balanced")):
        bounds = [metrics[name]["f_0"] for metrics in found]
        assert bounds[0] == bounds[1] != pytest.approx(found[0][other]["f_0"], rel=1e-3)
        assert len({metrics[name]["eval_max_violation"] for metrics in found}) == 1


@pytest.mark.parametrize(
    "fresh", [300, 20]
)  # so that of the rows of both sets 1 % are of training, or many more
def test_of_several_evaluation_sets_each_is_judged_by_its_own_rows(tmp_path, fresh):
    sets = {"fresh": FRESH[:fresh], "trained": DATA[:3]}
    trainer = trained(bert(), config(tmp_path, max_steps=1), train_dataset=DATA, eval_dataset=sets)
    for name, expected in (("fresh", False), ("trained", True)):
        for given in (name, sets[name]):
            trainer.evaluate(given)
            assert trainer._run.record.certificate.also_selected == expected
            assert trainer.evaluate_layers(given).certificate().also_selected == expected
    trainer.args.eval_strategy = "steps"  # whose evaluations choose, of all of the sets
    trainer.evaluate("fresh")
    assert trainer._run.record.certificate.also_selected


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


def test_rows_that_chose_settings_in_a_search_are_no_longer_fresh(tmp_path):
    pytest.importorskip("optuna")
    given = {"model_init": lambda: bert(), "train_dataset": DATA, "eval_dataset": FRESH[:100]}
    trainer = DescentTrainer(None, config(tmp_path, max_steps=1), **given)
    trainer.hyperparameter_search(lambda trial: {"descent_alpha": 0.2}, n_trials=1)
    trainer.train()
    for rows, also_selected in ((None, True), (FRESH[:100], True), (FRESH[100:], False)):
        trainer.evaluate(rows)
        assert trainer._run.record.certificate.also_selected == also_selected
        assert trainer.evaluate_layers(rows).certificate().also_selected == also_selected
    assert summary_of(trainer)["select_rows"] == 100


def test_the_training_data_itself_is_told_whatever_kind_it_is(tmp_path):
    rows, fresh = (
        torch.utils.data.Subset(DATA, range(100)),
        torch.utils.data.Subset(FRESH, range(100)),
    )
    for evaluated, given in ((fresh, rows), (rows, None)):
        trainer = DescentTrainer(
            bert(), config(tmp_path, max_steps=1), train_dataset=rows, eval_dataset=evaluated
        )
        trainer.evaluate(given)
        assert not trainer._run.record.certificate.also_selected
        trainer.train()
        trainer.evaluate(given)
        assert trainer._run.record.certificate.also_selected
        trainer.evaluate(fresh)
        assert not trainer._run.record.certificate.also_selected


class Counted(list):
    """Counts how many of its rows are read."""

    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)


def test_of_many_rows_some_are_looked_at_and_of_rows_that_cost_something_none(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("hf_descent.training.holdout.MOST_ROWS", 200)
    trainer = DescentTrainer(bert(), config(tmp_path))
    keys = row_keys(trainer, Counted(DATA))
    as_lists = [
        {"input_ids": row["input_ids"].tolist()} for row in DATA
    ]  # whose keys are those of the tensors
    all_keys = {
        key
        for start in range(0, len(DATA), 200)
        for key in row_keys(trainer, as_lists[start : start + 200])
    }
    assert Counted.reads == 201 and len(set(keys)) == 200 and set(keys) <= all_keys
    assert row_keys(trainer, plain(DATA)) == keys
    stream, part = Stream(iter(DATA)), torch.utils.data.Subset(DATA, range(9))
    for other in (stream, part, plain(DATA).with_transform(dict), [], None):
        assert row_keys(trainer, other) == []


def test_large_rows_are_compared_by_some_of_their_numbers(tmp_path):
    images = torch.rand(8300, 3, 1, 224).expand(-1, -1, 224, -1)
    rows = [{"pixel_values": image, "labels": index % 2} for index, image in enumerate(images)]
    given = {"train_dataset": rows[:8000], "dual_dataset": rows[7996:8296]}
    trainer = DescentTrainer(vit(), config(tmp_path), **given)
    with pytest.raises(ValueError, match=r"`train_dataset` \(1.3%"):
        trainer.train()

    few = images[:3].numpy().copy()
    keys = row_keys(trainer, rows[:3])
    lists = List(List(List(Value("float32"))))
    for kind in (Array3D((3, 224, 224), "float32"), lists, List(lists.feature, length=3)):
        stored = Dataset.from_dict({"pixel_values": few.tolist()}, Features({"pixel_values": kind}))
        assert row_keys(trainer, stored) == row_keys(trainer, stored.with_format("torch")) == keys
    for given in (few, few.tolist()):
        assert row_keys(trainer, [{"pixel_values": image} for image in given]) == keys
    few[:, :, 150:160] += 1.0
    assert not {*keys} & {*row_keys(trainer, [{"pixel_values": image} for image in few])}
    texts = torch.arange(2)[:, None] * torch.arange(32_767).eq(20_000)  # that differ by one token
    assert len({*row_keys(trainer, [{"pixel_values": text} for text in texts])}) == 2
    forms = [
        {"input_ids": [1, 2], "pixel_values": [number]} for number in (1.0, 2.0)
    ]  # one text, two images
    for given in (forms, Dataset.from_list(forms)):
        first, second = row_keys(reader := DescentTrainer(bert(), config(tmp_path)), given)
        assert first != second
    texts = [
        {"input_ids": [number]} for number in range(9)
    ]  # the first row does not tell what others have
    assert row_keys(reader, forms + texts)[2:] == row_keys(reader, texts)
    encoded = [{"bytes": text, "path": None} for text in (b"not", b"an", b"image", b"not")]
    keys = row_keys(
        trainer, Dataset.from_dict({"pixel_values": encoded}, Features({"pixel_values": Image()}))
    )
    assert len(keys) == 4 and len({*keys}) == 3  # nothing is decoded


def classifier(args):
    return DescentTrainer(bert(), args, train_dataset=DATA)


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
    return Seq2SeqDescentTrainer(model, args, DataCollatorForSeq2Seq(word_tokenizer(), model), rows)


def packed_tuner(args):
    args = SFTDescentConfig.from_training_arguments(
        args, max_length=12, packing=True, eval_packing=False
    )
    data = Dataset.from_dict({"text": texts(500)})
    return SFTDescentTrainer(tuned_llama(), args, train_dataset=data, processing_class=TOKENIZER)


@pytest.mark.parametrize("make", [classifier, translator, packed_tuner])
def test_what_moves_the_multipliers_is_the_evaluation_of_the_held_out_rows(tmp_path, make):
    """Of a model that does not learn, and turns that take all of the rows."""
    trainer = make(config(tmp_path, dual_holdout=0.5, learning_rate=0.0, max_steps=1))
    trainer.args.per_device_train_batch_size = len(trainer.train_dataset) // 2
    trainer.train()
    _, held_out = split(trainer.train_dataset, trainer.args)
    assert len(held_out) == trainer.args.per_device_train_batch_size >= 200
    found = summary_of(trainer)["dual_layer_losses"]
    if isinstance(trainer.train_dataset, Dataset):
        assert trainer.padding_free
        held_out = trainer.train_dataset.select(held_out.indices)
    metrics = trainer.evaluate(held_out)
    layers = range(1, len(found) + 1)
    assert found == pytest.approx(
        [metrics[f"eval_layer_loss_{layer}"] for layer in layers], rel=1e-5
    )


def test_held_out_rows_are_read_in_batches_of_the_size_that_was_found(tmp_path, monkeypatch):
    trainer, sizes = classifier(config(tmp_path, dual_holdout=0.5, auto_find_batch_size=True)), []
    forward = trainer.model.forward

    def limited(input_ids, **inputs):
        if len(input_ids) > 4:
            raise RuntimeError("CUDA out of memory.")
        sizes.append(len(input_ids))
        return forward(input_ids=input_ids, **inputs)

    monkeypatch.setattr(trainer.model, "forward", limited)
    trainer.train()
    assert trainer.state.global_step == 6 and max(sizes) == 4


def test_rows_that_trl_has_not_tokenised_are_known_to_have_trained_the_model(tmp_path):
    args = SFTDescentConfig.from_training_arguments(config(tmp_path), max_length=12)
    data, others = (Dataset.from_dict({"text": rows}) for rows in (texts(24), texts(48)[24:]))
    trainer = SFTDescentTrainer(tuned_llama(), args, train_dataset=data, processing_class=TOKENIZER)
    trainer.train()
    for rows, known in ((data, True), (others, False)):
        assert trainer.evaluate_layers(rows).facts["also_selected"] == known


def test_large_vocabularies_are_read_on_a_sample_of_the_tokens():
    """An unbiased one, the same for one key; the last layer on all."""
    rows = language_data(48)
    model, batch = llama(vocab_size=VOCAB).eval(), default_data_collator(rows)
    layers = find_layer_losses(model, batch, TaskLoss.probe(model, batch), token_fraction=0.3)
    with torch.no_grad():
        whole = layers.measure(model, batch)
        samples = [layers.measure(model, batch, key=(draw % 40,)).means for draw in range(41)]
    assert torch.equal(samples[0], samples[40]) and not torch.equal(samples[0], samples[1])
    errors = torch.stack(samples[:40]) - whole.means  # [draws, layers]
    assert errors[:, -1].abs().max() < 1e-5 and (errors[:, :-1].std(0) > 0).all()
    assert (errors[:, :-1].mean(0).abs() < 4 * errors[:, :-1].std(0) / 40**0.5).all()


def test_resumed_equals_straight(tmp_path):
    settings = {
        "dual_holdout": 0.5, "max_steps": 27, "noise_gamma": 0.4, "save_strategy": "steps", "save_steps": 11,
        "descent_alpha": "line", "initial_loss_bound": "auto", "dual_warmup_steps": 10, "exit_targets": {1: 0.0},
    }  # fmt: skip
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-11")):
        trainer = DescentTrainer(
            bert(dropout=0.2), config(tmp_path, **settings), train_dataset=DATA
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(trainer)
    straight, resumed = runs
    assert straight.multipliers.values.any()
    assert_equal_runs(straight, resumed)
    assert summary_of(straight)["dual_layer_losses"] == summary_of(resumed)["dual_layer_losses"]
    changed = DescentTrainer(
        bert(), config(tmp_path, **settings | {"dual_holdout": 0.48}), train_dataset=DATA
    )
    with pytest.raises(ValueError, match="dual_holdout"):
        changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-11"))


def test_which_rows_are_held_out_depends_on_the_seed_of_the_data_alone(tmp_path):
    first, same, other = (
        split(DATA, config(tmp_path, dual_holdout=0.5, **seeds))[1].indices
        for seeds in ({"seed": 1}, {"seed": 2, "data_seed": 1}, {"seed": 2})
    )
    assert first == same and set(first) != set(other)


def test_the_noise_of_training_acts_on_held_out_rows(tmp_path):
    found = []
    for gamma in (0.0, 3.0):
        args = config(tmp_path, dual_holdout=0.5, noise_gamma=gamma, learning_rate=0.0, max_steps=1)
        trainer = trained(bert(), args, train_dataset=DATA)
        found.append(summary_of(trainer)["dual_layer_losses"])
    assert found[0] != pytest.approx(found[1], rel=1e-4)


def test_micro_batches_of_held_out_rows_have_noise_of_their_own(tmp_path):
    model, read = bert(), []
    model.bert.encoder.layer[0].register_forward_pre_hook(
        lambda layer, args: None if layer.training else read.append(args[0])
    )
    args = config(tmp_path, noise_gamma=[0.5, 1.0], gradient_accumulation_steps=2, max_steps=1)
    trained(model, args, train_dataset=DATA, dual_dataset=FRESH[:1] * 200)
    first, second = read[-2:]  # the same row eight times each, but for its noise
    differences = (first[:, None] - second[None]).abs().sum(dim=(2, 3))  # [rows, rows]
    assert differences.shape == (8, 8) and differences.min() > 1


@pytest.mark.parametrize(
    ("rows", "share", "told"),
    [
        (DATA, 0.4, "of 420 is 168 rows"),
        (Stream(iter(DATA)), 0.5, "of a stream is 0"),
        (DATA, 0.6, "0.5"),
    ],
)
def test_what_is_no_share_of_rows_is_refused(tmp_path, rows, share, told):
    with pytest.raises(ValueError, match=f"`dual_holdout`.*{told}"):
        DescentTrainer(bert(), config(tmp_path, dual_holdout=share), train_dataset=rows).train()


def test_a_custom_loop_restarts_its_slacks_by_itself():
    asked = {"resilience": 0.1, "resilience_form": "slack"}
    with pytest.raises(ValueError, match="`slack_restart`.*restart_slacks"):
        DescentObjective(bert(), batches(DATA), DescentArguments(**asked), max_steps=1)
    args = DescentArguments(**asked, slack_restart=False)
    objective = DescentObjective(bert(), batches(DATA), args, max_steps=1)
    objective.multipliers.slacks += 1
    objective.multipliers.restart_slacks()
    assert not objective.multipliers.slacks.any()


def test_objectives_without_multipliers_train_on_all_rows(tmp_path):
    for objective in ("erm", "deep_supervision"):
        args = config(tmp_path, dual_holdout=0.5, objective=objective, max_steps=1)
        trainer = trained(bert(), args, train_dataset=DATA)
        assert len(trainer.get_train_dataloader().dataset) == len(DATA)
        assert "dual_rows" not in summary_of(trainer)
