"""The lens on models that a user may have: against the layers' logits and hidden states, one row at a time."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy import stats
from tiny.files import save_generator
from tiny.models import bert, llama, spread
from tiny.tokenizers import tokenizer, word_tokenizer
from transformers import ViTConfig, ViTForImageClassification, ViTForMaskedImageModeling

from hf_descent import cli, layer_logits
from hf_descent.early_exit.tuned_lens import fit_lens
from hf_descent.evaluation.lens import Lens


LAYERS = 3
ROWS = 40


def vit(kind=ViTForImageClassification):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    pictures = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    return kind(ViTConfig(num_hidden_layers=LAYERS, **sizes, **pictures))


def texts():
    return [
        " ".join(f"w{(7 * row + place) % 38}" for place in range(4 + row % 7))
        for row in range(ROWS)
    ]


def text_rows(path):
    rows = [{"text": text, "label": number % 3} for number, text in enumerate(texts())]
    path.write_text("\n".join(map(json.dumps, rows)))
    batches = [word_tokenizer()([row["text"]], return_tensors="pt") for row in rows]
    return [(batch, torch.tensor([row["label"]])) for batch, row in zip(batches, rows)]


def image_rows(path):
    pixels = np.random.default_rng(0).normal(size=(ROWS, 1, 8, 8)).astype("float32")
    labels = [row % 3 for row in range(ROWS)]
    Dataset.from_dict({"image": pixels.tolist(), "label": labels}).to_parquet(str(path))
    return [
        ({"pixel_values": torch.from_numpy(image)[None]}, torch.tensor([label]))
        for image, label in zip(pixels, labels)
    ]


def language_rows(path):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts()))
    batches = [word_tokenizer()([text], return_tensors="pt") for text in texts()]
    return [(batch, batch["input_ids"][:, 1:]) for batch in batches]


KINDS = {
    "bert": (lambda: bert(num_layers=LAYERS), text_rows, "rows.jsonl"),
    "vit": (vit, image_rows, "rows.parquet"),
    "llama": (lambda: llama(num_layers=LAYERS), language_rows, "rows.jsonl"),
}


def expected_layers(model, rows):
    """Of each layer the loss, accuracy, entropy of the labelled predictions, and norm of the hidden states."""
    stack = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    states = []
    hooks = [
        layer.register_forward_hook(
            lambda module, args, output: states.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        for layer in stack
    ]
    values = [[] for _ in range(LAYERS)]
    norms = [[] for _ in range(LAYERS)]
    for batch, labels in rows:
        states.clear()
        with torch.no_grad():
            model(**batch)
            hidden = list(states)
            logits = layer_logits(model, batch)
        for layer in range(LAYERS):
            own = logits[layer]
            own = own[:, :-1] if labels.dim() > 1 else own
            own = own.flatten(0, -2)
            logs = own.log_softmax(-1)
            loss = torch.nn.functional.nll_loss(logs, labels.flatten(), reduction="none")
            hits = (own.argmax(-1) == labels.flatten()).float()
            entropy = -(logs.exp() * logs).sum(-1)
            values[layer].append(torch.stack([loss, hits, entropy]))
            norms[layer].append(hidden[layer].norm(dim=-1).flatten())
    for hook in hooks:
        hook.remove()
    means = torch.stack([torch.cat(parts, 1).mean(1) for parts in values])  # [layers, 3]
    return [*means.T.tolist(), [torch.cat(parts).mean().item() for parts in norms]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_lens_is_what_the_layers_predict(kind, tmp_path, capsys):
    make, rows_in, file = KINDS[kind]
    model = spread(make())
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = rows_in(tmp_path / file)
    cli.main(
        ["lens", str(tmp_path / "model"), "--data", str(tmp_path / file), "--max_seq_length", "12"]
    )

    printed = capsys.readouterr().out
    found = Lens.from_json(str(tmp_path / "model" / "lens.json"))
    expected = expected_layers(model, rows)
    measured = [found.losses, found.values, found.entropies, found.norms]
    for values, truth in zip(measured, expected):
        np.testing.assert_allclose(values, truth, rtol=1e-4, atol=1e-6)
    assert found.items == sum(labels.numel() for _, labels in rows)
    assert str(found) in printed and found.summary in printed
    assert "Next: `hf-descent exit " in printed

    page = (tmp_path / "model" / "lens.md").read_text()
    assert found.summary in page and f"{found.losses[0]:.4g}" in page
    for image in ("lens.png", "lens.svg"):
        assert (tmp_path / "model" / image).stat().st_size > 1000


def test_the_interval_of_an_entropy_is_that_of_a_mean_over_rows(tmp_path):
    model = spread(vit())
    model.save_pretrained(tmp_path / "model")
    rows = image_rows(tmp_path / "rows.parquet")
    cli.main(
        [
            "lens",
            str(tmp_path / "model"),
            "--data",
            str(tmp_path / "rows.parquet"),
            "--output_dir",
            str(tmp_path),
        ]
    )
    found = Lens.from_json(str(tmp_path / "lens.json"))
    logits = [layer_logits(model, batch)[0].detach().softmax(-1)[0] for batch, _ in rows]
    entropies = np.array([stats.entropy(each.numpy()) for each in logits])
    plain = stats.t.ppf(0.975, ROWS - 1) * entropies.std(ddof=1) / np.sqrt(ROWS)
    assert plain < found.entropy_radii[0] < 1.5 * plain  # wider, for the tails that were not seen


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_fitted_on_the_rows_of_the_training_file(kind, tmp_path, capsys, monkeypatch):
    make, rows_in, file = KINDS[kind]
    model = spread(make())
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows_in(tmp_path / file)
    rows_in(tmp_path / f"train_{file}")
    seen = []

    def fit_on(model, rows, **settings):
        seen.append(len(rows))
        return fit_lens(model, rows, steps=60, **settings)

    monkeypatch.setattr("hf_descent.commands.lens.fit_lens", fit_on)
    flags = ["--data", str(tmp_path / file), "--fit", "affine"]
    with pytest.raises(ValueError, match="`train_file` is not given, .* like `data`"):
        cli.main(["lens", str(tmp_path / "model"), *flags])
    flags += ["--train_file", str(tmp_path / f"train_{file}"), "--max_train_samples", "30"]
    cli.main(["lens", str(tmp_path / "model"), *flags, "--max_seq_length", "12"])

    assert seen == [30]
    found = Lens.from_json(str(tmp_path / "model" / "lens.json"))
    page = (tmp_path / "model" / "lens.md").read_text()
    assert found.fitted_losses[-1] == pytest.approx(found.losses[-1], rel=1e-4)
    assert np.isfinite(found.fitted_losses).all() and np.isfinite(found.fitted_radii[-1])
    assert (found.fitted_losses[:-1] != found.losses[:-1]).all()
    assert "| fitted loss |" in page and f"{found.fitted_losses[0]:.4g}" in page
    assert "Through the fitted maps it is layer" in found.summary
    assert found.summary in capsys.readouterr().out


def a_lens(losses, chance=None):
    ones = np.ones(len(losses))
    unknown = np.full(len(losses), np.nan)
    return Lens("accuracy", losses, unknown, ones, ones, ones, ones, ones, ones, 100, chance)


@pytest.mark.parametrize(
    ("losses", "chance", "summary"),
    [
        ([0.9, 0.52, 0.5], None, "Layer 2 of 3 is the first whose loss is within 5 %"),
        ([0.9, 0.6, 0.5], None, "No layer before the last has a loss within 5 %"),
        ([0.9, 0.6, 0.5], 0.7, "1 of 3 layers do no better than guessing (loss 0.7)."),
        ([0.9, 0.6, 0.5], 1.7, "Every layer does better than guessing (loss 1.7)."),
        ([0.9, 0.6, np.nan], 0.7, "The last layer's loss is nan"),
    ],
)
def test_what_was_found_is_said_in_a_sentence(losses, chance, summary):
    found = a_lens(losses, chance)
    assert summary in found.summary
    assert found.rows()[1][:3] == ["1", "0.9", "-"]


def test_what_cannot_be_read_is_refused(tmp_path):
    vit(ViTForMaskedImageModeling).save_pretrained(tmp_path / "masked")
    with pytest.raises(ValueError, match="ViTForMaskedImageModeling; give a classifier of texts"):
        cli.main(["lens", str(tmp_path / "masked"), "--data", "rows.jsonl"])
    llama(num_layers=2).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="give a file of texts or instructions by `--data`"):
        cli.main(["lens", str(tmp_path / "model")])


def test_of_instructions_with_an_answer_the_answer_is_read(tmp_path):
    folder = save_generator(tmp_path / "model", False)
    rows = [{"instruction": f"Add {row}.", "output": "It is."} for row in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    cli.main(["lens", folder, "--data", str(tmp_path / "rows.json")])
    answer = tokenizer(False)("It is.</s>")["input_ids"]
    assert Lens.from_json(f"{folder}/lens.json").items == 4 * len(answer)
