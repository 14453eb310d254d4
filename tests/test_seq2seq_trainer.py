import numpy as np
import pytest
import torch
from architectures import BART, T5, T5_DECODER, build, truncated
from tiny.models import VOCAB
from tiny.tokenizers import word_tokenizer
from tiny.training import fitted
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_descent import DescentConfig, Seq2SeqDescentConfig, Seq2SeqDescentTrainer


MODELS = {
    "T5ForConditionalGeneration": dict(T5_DECODER, dropout_rate=0.0),
    "BartForConditionalGeneration": dict(BART, dropout=0.0),
}


def rows(count, seed=0):
    """Token sequences of different lengths, and their reversals."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 8, (count,), generator=generator).tolist()
    ids = [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row[::-1]} for row in ids]


def token_sum(prediction):
    return {
        "tokens": int(np.where(prediction.predictions == -100, 0, prediction.predictions).sum())
    }


def make(cls, folder, model, **given):
    config_class = (
        Seq2SeqDescentConfig if cls is Seq2SeqDescentTrainer else Seq2SeqTrainingArguments
    )
    fixed = {"descent_alpha": 0.3, "initial_loss_bound": 3.0, "dual_warmup_steps": 0}
    defaults = {
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 6, "learning_rate": 3e-3,
        "logging_steps": 1, "per_device_eval_batch_size": 16, "generation_max_length": 9,
    }  # fmt: skip
    args = config_class(
        str(folder), **defaults | (fixed if cls is Seq2SeqDescentTrainer else {}) | given
    )
    return cls(
        model, args, DataCollatorForSeq2Seq(word_tokenizer(), model), rows(32), rows(12, 1), word_tokenizer(),
        compute_metrics=token_sum if args.predict_with_generate else None,
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_constrained_layers_and_the_stock_trainer_s_generation(tmp_path, name, smoothing):
    settings = {"predict_with_generate": True, "label_smoothing_factor": smoothing}
    trainer = fitted(make(Seq2SeqDescentTrainer, tmp_path, build(name, MODELS[name]), **settings))

    assert trainer.multipliers.values.max() > 0

    stock = make(Seq2SeqTrainer, tmp_path, trainer.model, **settings)

    for options in ({}, {"num_beams": 2, "max_length": 6}):
        ours = trainer.predict(rows(12, 2), **options)
        theirs = stock.predict(rows(12, 2), **options)
        np.testing.assert_array_equal(ours.predictions, theirs.predictions)
        np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
        assert ours.metrics["test_tokens"] == theirs.metrics["test_tokens"]

    metrics = trainer.evaluate()
    expected = stock.evaluate()

    assert metrics["eval_tokens"] == expected["eval_tokens"]

    for layer in (1, 2, 3):
        short = make(
            Seq2SeqTrainer, tmp_path, truncated(trainer.model, MODELS[name], layer), **settings
        )
        loss = short.evaluate()["eval_loss"]
        assert metrics[f"eval_layer_loss_{layer}"] == pytest.approx(loss, rel=1e-5)

    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)

    trainer.args.predict_with_generate = False
    trainer.compute_metrics = None
    without = trainer.evaluate()

    for kind in ("loss", "layer_loss_1", "layer_loss_2", "max_violation"):
        assert metrics[f"eval_{kind}"] == pytest.approx(without[f"eval_{kind}"], rel=1e-6)


def test_plain_training_is_the_stock_trainer_s(tmp_path):
    weights = []
    logs = []
    for cls, given in ((Seq2SeqTrainer, {}), (Seq2SeqDescentTrainer, {"objective": "erm"})):
        trainer = fitted(make(cls, tmp_path, build("T5ForConditionalGeneration", T5), **given))
        weights.append(trainer.model.state_dict())
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert logs[0] == logs[1] and len(logs[0]) == 6
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_a_resumed_run_is_the_one_that_was_not_cut(tmp_path):
    generation = GenerationConfig(
        max_length=7,
        num_beams=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        bos_token_id=0,
    )
    generation.save_pretrained(tmp_path / "generation")
    settings = {"predict_with_generate": True, "generation_max_length": None, "save_steps": 3}
    settings.update(eval_strategy="steps", eval_steps=3)
    found = []

    # As an object, and as the path that a command line gives.
    for how, resume in (
        (generation, None),
        (tmp_path / "generation", str(tmp_path / "checkpoint-3")),
    ):
        model = build("T5ForConditionalGeneration", T5)
        trainer = fitted(
            make(Seq2SeqDescentTrainer, tmp_path, model, **settings, generation_config=how), resume
        )
        found.append(
            (trainer.multipliers.values, trainer.model.state_dict(), trainer.predict(rows(12, 2)))
        )

    (multipliers, weights, prediction), (again, weights_again, prediction_again) = found

    assert multipliers.max() > 0 and torch.equal(multipliers, again)
    assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items())
    assert prediction.predictions.shape == (12, 7)

    np.testing.assert_array_equal(prediction.predictions, prediction_again.predictions)

    assert GenerationConfig.from_pretrained(tmp_path / "checkpoint-6").num_beams == 2


@pytest.mark.parametrize("given", [DescentConfig, Seq2SeqTrainingArguments])
def test_arguments_of_other_kinds_become_its_own(tmp_path, given):
    args = given(str(tmp_path), report_to="none", use_cpu=True, learning_rate=3e-4)
    trainer = Seq2SeqDescentTrainer(
        build("T5ForConditionalGeneration", T5), args, train_dataset=rows(4)
    )
    assert isinstance(trainer.args, Seq2SeqDescentConfig) and trainer.args.learning_rate == 3e-4
