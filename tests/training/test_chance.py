"""The loss of the best constant prediction, measured on the training labels before the first step."""

import math

import numpy as np
import pytest
import torch
from tiny.data import Stream, classification_data
from tiny.models import VOCAB, bert, llama
from tiny.tokenizers import word_tokenizer
from tiny.training import config, trained
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, default_data_collator

from hf_descent import DescentTrainer, EmbeddingNoise
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.training import chance, dual_side


def measured(folder, model, data, collator=default_data_collator, **settings):
    """The loss at chance after a step of training, and the trainer."""
    args = config(
        folder,
        **{
            "max_steps": 1,
            "descent_alpha": 0.1,
            "initial_loss_bound": "auto",
            "dual_warmup_steps": 1,
            **settings,
        },
    )
    trainer = trained(model, args, train_dataset=data, data_collator=collator)
    return trainer.problem.chance_loss, trainer


def rows_of_classes(count):
    """Sorted by class, of which there are 6, 3 and 1 of 10."""
    return [
        {**row, "labels": 0 if index < 0.6 * count else 1 if index < 0.9 * count else 2}
        for index, row in enumerate(classification_data(count))
    ]


ENTROPY = -sum(share * math.log(share) for share in (0.6, 0.3, 0.1))


@pytest.mark.parametrize(
    ("is_alike", "of_other", "message"),
    [(True, ENTROPY, "all are alike"), (False, math.nan, "the examples of another process")],
    ids=["here", "elsewhere"],
)
def test_a_process_that_cannot_measure_leaves_no_other_waiting(
    tmp_path, monkeypatch, is_alike, of_other, message
):
    """A second process, of a stream of which each has a part, adds its own number."""
    summed = []

    def reduced(accelerator, tensor):
        summed.append(tensor.item())
        return tensor + of_other

    monkeypatch.setattr(chance, "reduced", reduced)
    rows = rows_of_classes(500)
    if is_alike:
        rows = [{**row, "labels": 1} for row in rows]

    with pytest.raises(ValueError, match=message):
        measured(tmp_path, bert(), rows)
    assert len(summed) == 1 and math.isnan(summed[0]) == is_alike


def test_the_labels_are_the_collator_s_and_of_all_parts_of_the_data(tmp_path):
    seen = []

    def collate(rows):
        seen.append(len(rows))
        batch = default_data_collator(rows)
        return {**batch, "labels": 2 - batch["labels"]}

    found, trainer = measured(tmp_path, bert(), rows_of_classes(10_000), collate)

    assert found == trainer.problem.initial_loss_bound == pytest.approx(ENTROPY, rel=0.03)
    # Those that are read one by one tell the data from others. The rest is of the step of training.
    assert 2_000 < sum(size for size in seen if size > 1) <= 2_000 + 3 * 8
    assert measured(tmp_path, bert(), rows_of_classes(500), collate)[0] == pytest.approx(
        ENTROPY, rel=0.005
    )

    # A model that is only evaluated: from the data that it is evaluated on.
    even = [{**row, "labels": index % 3} for index, row in enumerate(classification_data(300))]
    evaluating = DescentTrainer(
        bert(), config(tmp_path, descent_alpha=0.1, initial_loss_bound="auto")
    )
    evaluating.evaluate(even)

    assert evaluating.problem.chance_loss == pytest.approx(math.log(3), rel=1e-3)


def test_a_vocabulary_is_measured_on_many_labels(tmp_path):
    """Of 5,000 tokens by Zipf's law, half of which are ignored and none of the first predicted."""
    frequencies = 1 / np.arange(1, 5_001)
    frequencies /= frequencies.sum()
    tokens = np.random.default_rng(0).choice(5_000, (4_000, 60), p=frequencies)
    labels = np.where(np.arange(60) < 30, -100, tokens)
    data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]
    found, _ = measured(tmp_path, llama(num_layers=1, vocab_size=5_000), data)
    assert found == pytest.approx(-(frequencies * np.log(frequencies)).sum(), rel=0.01)


def test_data_that_can_be_read_only_once_needs_a_number(tmp_path):
    rows = rows_of_classes(400)
    assert (
        measured(tmp_path, bert(), Stream(rows))[0]
        == measured(tmp_path, bert(), Stream(rows[:]))[0]
    )
    assert measured(tmp_path, bert(), Stream(rows))[0] == pytest.approx(ENTROPY, rel=0.01)
    with pytest.raises(ValueError, match="read only once.*set it to the loss"):
        measured(tmp_path, bert(), Stream(iter(rows)))
    found, trainer = measured(tmp_path, bert(), Stream(iter(rows)), initial_loss_bound=1.2)
    assert found is None and trainer.state.global_step == 1


@pytest.mark.parametrize("seed", [None, 5])  # of a collator that draws by itself
def test_training_draws_as_if_nothing_had_been_measured(tmp_path, monkeypatch, seed):
    """Masks, dropout, the order of the rows and the noise: the losses are bit-equal."""
    tokenizer = word_tokenizer()
    tokenizer.mask_token = "[UNK]"

    def losses():
        model = BertForMaskedLM(bert(num_layers=2, dropout=0.1).config)
        settings = {
            "max_steps": 4,
            "logging_steps": 1,
            "initial_loss_bound": 3.0,
            "noise_gamma": 0.5,
        }
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=seed)
        rows = [{"input_ids": row["input_ids"]} for row in classification_data(40)]
        found, trainer = measured(tmp_path, model, rows, collator, **settings)
        return found, [log["loss"] for log in trainer.state.log_history if "loss" in log]

    chance, after = losses()

    assert 2 < chance < math.log(VOCAB)

    def unknown(*args):
        raise ValueError

    monkeypatch.setattr(dual_side, "measure_chance", unknown)

    assert losses() == (None, after) and len(after) == 4


@pytest.mark.parametrize("gamma", [0.0, 0.4, [0.2, 0.8]])
def test_the_loss_at_chance_of_a_denoiser_is_that_of_its_noisy_input(tmp_path, gamma):
    generator = torch.Generator().manual_seed(0)
    clean = torch.rand(600, 2, 16, generator=generator)
    given = clean + 0.05 * torch.randn(600, 2, 16, generator=generator)
    data = [{"pixel_values": row, "labels": label} for row, label in zip(given, clean)]
    model = UTForVideoDenoising(UTConfig(hidden_size=16, num_hidden_layers=2, loss_scale=0.3))
    found, _ = measured(tmp_path, model, data, noise_gamma=gamma)

    seen = []
    sigma = clean.std().item() if gamma == 0 else model.config.noise_sigma

    with (
        EmbeddingNoise(model, gamma, seed=1, sigma=sigma),
        torch.no_grad(),
    ):  # a later hook sees what it adds
        handle = model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
        )
        model(pixel_values=given, labels=clean)

    handle.remove()
    expected = 0.3 * (seen[0]["pixel_values"] - clean).square().sum((1, 2)).mean().item()

    assert found == pytest.approx(expected, rel=0.03)
