"""From `exit --fewest_layers` to `export --layers`: which layers to leave out, and the model without them."""

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny.models import bert, llama, spread
from tiny.tokenizers import word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ViTConfig,
    ViTForImageClassification,
)

from hf_descent import cli
from hf_descent.early_exit import HealingTrainer, find_layer_sets, keep_layers
from hf_descent.early_exit.layer_sets import LayerSetProfile, spans


LAYERS = 4
IDLE = 2  # the layer that does nothing
COUNT = 120  # of examples with skewed losses 100 are the least


def silenced(model):
    """The model with a layer that hands on what it receives, by weights that are zero."""
    stack = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    assert len(stack) == LAYERS
    names = (
        "attention.output.dense",
        "output.dense",
        "o_proj",
        "down_proj",
        "fc2",
        "attention.o_proj",
    )
    for name, module in stack[IDLE - 1].named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(names):
            module.weight.data.zero_()
            if module.bias is not None:
                module.bias.data.zero_()
    return model.eval()


def words_of(row):
    return " ".join(f"w{(7 * row + place * (row % 5 + 1)) % 38}" for place in range(10))


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def text_files(tmp_path, model):
    """Rows that the model classifies as they are labelled, so that its loss is far below chance."""
    texts = [words_of(row) for row in range(2 * COUNT)]
    inputs = word_tokenizer()(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        labels = model(**inputs).logits.argmax(-1).tolist()
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels)]
    whole = written(tmp_path / "train.jsonl", rows)
    validation = written(tmp_path / "validation.jsonl", rows[:COUNT])
    test = written(tmp_path / "test.jsonl", rows[COUNT:])
    return ["--train_file", whole, "--validation_file", validation, "--test_file", test], inputs


def image_files(tmp_path, model):
    pixels = np.random.default_rng(0).normal(size=(2 * COUNT, 1, 8, 8)).astype("float32")
    inputs = {"pixel_values": torch.from_numpy(pixels)}
    with torch.no_grad():
        labels = model(**inputs).logits.argmax(-1).tolist()
    flags = ["--image_column", "pixels", "--label_column", "label"]
    parts = {"train": slice(None), "validation": slice(COUNT), "test": slice(COUNT, None)}
    for name, part in parts.items():
        path = str(tmp_path / f"{name}.parquet")
        Dataset.from_dict({"pixels": pixels[part].tolist(), "label": labels[part]}).to_parquet(path)
        flags += [f"--{name}_file", path]
    return flags, inputs


def vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    pictures = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=LAYERS, **sizes, **pictures))


CLASSIFIERS = {
    "bert": (lambda: bert(num_layers=LAYERS), text_files, AutoModelForSequenceClassification),
    "vit": (vit, image_files, AutoModelForImageClassification),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_layer_that_does_nothing_is_left_out_and_the_exported_model_is_the_same(
    name, tmp_path, capsys
):
    make, files, auto_class = CLASSIFIERS[name]
    model = silenced(spread(make()))
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    flags, inputs = files(tmp_path, model)
    cli.main(["exit", str(tmp_path / "model"), *flags, "--fewest_layers", "2"])

    printed = capsys.readouterr().out
    profile = LayerSetProfile.from_json(str(tmp_path / "model" / "layer_sets.json"))
    assert [len(kept) for kept in profile.layers] == [4, 3, 2]
    assert profile.layers[1] == [1, 3, 4] and profile.items == COUNT
    assert profile.ratios[1] == pytest.approx(1, abs=1e-3)
    assert str(profile) in printed and profile.headline in printed
    assert re.fullmatch(r"VERDICT: MET, price [+-]0.0 %", profile.headline)
    assert not (tmp_path / "model" / "exit_profile.json").exists()

    cli.main(["card", str(tmp_path / "model")])
    assert str(profile) in (tmp_path / "model" / "README.md").read_text()
    shows = f"Next: `hf-descent show {tmp_path / 'model'}`"  # which refuses images
    assert (shows in capsys.readouterr().out) == (name == "bert")

    command = re.search(r"Next: `hf-descent (export .*) --output_dir DIR`", printed)[1].split()
    cli.main([*command, "--output_dir", str(tmp_path / "short")])
    written_out = capsys.readouterr().out
    assert f"Layers {command[-1]} of 4 layers are in" in written_out
    assert ("Next: `hf-descent show " in written_out) == (name == "bert")
    short = auto_class.from_pretrained(tmp_path / "short")
    assert short.config.num_hidden_layers == len(profile.smallest())
    cli.main(
        ["export", command[1], "--layers", "1", "3-4", "--output_dir", str(tmp_path / "three")]
    )
    three = auto_class.from_pretrained(tmp_path / "three")
    with torch.no_grad():
        torch.testing.assert_close(
            three(**inputs).logits, model(**inputs).logits, rtol=1e-3, atol=1e-3
        )


def test_a_language_model_chooses_by_one_half_of_the_rows_and_reports_on_the_other(
    tmp_path, capsys
):
    model = silenced(spread(llama(num_layers=LAYERS)))
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written(tmp_path / "texts.jsonl", [{"text": words_of(row)} for row in range(80)])
    flags = ["--data", data, "--fewest_layers", "2", "--output_dir", str(tmp_path / "out")]
    cli.main(["exit", str(tmp_path / "model"), *flags])

    profile = LayerSetProfile.from_json(str(tmp_path / "out" / "layer_sets.json"))
    ids = [word_tokenizer()(words_of(row))["input_ids"] for row in range(80)]
    searched = [{"input_ids": row, "labels": row} for row in ids[:40]]
    assert profile.layers == find_layer_sets(model, searched, fewest=2)
    assert profile.items == sum(len(row) - 1 for row in ids[40:])
    with torch.no_grad():
        losses = [
            model(torch.tensor([row]), labels=torch.tensor([row])).loss.item() for row in ids[40:]
        ]
    assert profile.losses[0] == pytest.approx(np.mean(losses), rel=1e-4)
    assert "VERDICT: " in capsys.readouterr().out

    words = ["--layers", "1,3-4", "--output_dir", str(tmp_path / "short")]
    cli.main(["export", str(tmp_path / "model"), *words])
    short = AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    with torch.no_grad():
        batch = torch.tensor(ids[:4])
        torch.testing.assert_close(short(batch).logits, model(batch).logits)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--layers", "1-9"], "increasing numbers from 1 to 4"),
        (["--layers", "two"], "name layers as in"),
        (["--layers", "1", "--layer", "1"], "not allowed with"),
        ([], "one of the arguments --layer --layers is required"),
    ],
)
def test_other_layers_are_refused(words, reason, tmp_path):
    llama(num_layers=LAYERS).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=reason):
        cli.main(["export", str(tmp_path / "model"), *words, "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_more_layers_than_there_are_cannot_stay(tmp_path):
    spread(llama(num_layers=2)).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written(tmp_path / "texts.jsonl", [{"text": words_of(row)} for row in range(4)])
    with pytest.raises(ValueError, match="the model has 1 to 2 layers"):
        cli.main(["exit", str(tmp_path / "model"), "--data", data, "--fewest_layers", "3"])


HEALING = ["--heal_steps", "30", "--heal_learning_rate", "0.003", "--fewest_layers", "2"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_healed_on_its_training_rows_and_judged_on_its_test_rows(
    name, tmp_path, capsys
):
    make, files, auto_class = CLASSIFIERS[name]
    model = spread(make()).eval()
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    flags, inputs = files(tmp_path, model)
    healed = str(tmp_path / "healed")
    cli.main(["exit", str(tmp_path / "model"), *flags, *HEALING, "--heal", healed])

    printed = capsys.readouterr().out
    profile = LayerSetProfile.from_json(str(tmp_path / "model" / "layer_sets.json"))
    kept = profile.layers[1]
    assert len(profile.layers) == 2 and len(kept) == 2 and profile.healed == [False, True]
    assert str(profile) in printed and profile.headline in printed
    assert f"2 of 4 layers, {spans(kept)}, are healed and in {healed}." in printed

    short = auto_class.from_pretrained(healed).eval()
    cut = keep_layers(model, kept).eval()
    test = {key: value[COUNT:] for key, value in inputs.items()}
    with torch.no_grad():
        truth = model(**test).logits
        losses = [F.cross_entropy(each(**test).logits, truth.argmax(-1)) for each in (short, cut)]
    assert profile.losses[1] == pytest.approx(losses[0].item(), rel=1e-4)
    assert losses[0] < losses[1]
    if name == "bert":
        assert AutoTokenizer.from_pretrained(healed)("w1 w2") == word_tokenizer()("w1 w2")

    cli.main(["card", str(tmp_path / "model")])
    assert str(profile) in (tmp_path / "model" / "README.md").read_text()


HEADS = [("bert", "affine", 2), ("vit", "norm", 2), ("vit", "block", 3)]


@pytest.mark.parametrize(("name", "exit_head", "depth"), HEADS)
def test_an_exit_head_is_trained_behind_the_first_layers(name, exit_head, depth, tmp_path, capsys):
    make, files, auto_class = CLASSIFIERS[name]
    model = spread(make()).eval()
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    flags, inputs = files(tmp_path, model)
    flags += [*HEALING, "--heal", str(tmp_path / "exit"), "--exit_head", exit_head]
    cli.main(["exit", str(tmp_path / "model"), *flags])

    kept = [1, 2] if depth == 2 else [1, 2, 4]
    profile = LayerSetProfile.from_json(str(tmp_path / "model" / "layer_sets.json"))
    assert profile.layers[1] == kept and profile.healed == [False, True]
    assert f"{depth} of 4 layers, {spans(kept)}, are healed" in capsys.readouterr().out

    short = auto_class.from_pretrained(tmp_path / "exit").eval()
    assert short.config.num_hidden_layers == depth
    test = {key: value[COUNT:] for key, value in inputs.items()}
    with torch.no_grad():
        truth = model(**test).logits.argmax(-1)
        losses = [
            F.cross_entropy(each(**test).logits, truth)
            for each in (short, keep_layers(model, kept).eval())
        ]
    assert profile.losses[1] == pytest.approx(losses[0].item(), rel=1e-4)
    assert losses[0] < losses[1]


@pytest.mark.parametrize("form", ["texts", "instructions"])
def test_a_language_model_is_healed_on_the_rows_of_the_training_file(form, tmp_path, monkeypatch):
    model = spread(llama(num_layers=LAYERS)).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": words_of(row)} for row in range(80)]
    if form == "instructions":
        rows = [{"instruction": words_of(row), "output": "w3 w4"} for row in range(80)]
    held_out = written(tmp_path / "held_out.jsonl", rows[:40])
    train = written(tmp_path / "train.jsonl", rows[40:])
    seen = {}
    training = HealingTrainer.train

    def record(trainer):
        seen["rows"] = trainer.train_dataset
        seen["dtype"] = trainer.model.dtype
        return training(trainer)

    monkeypatch.setattr(HealingTrainer, "train", record)
    flags = ["--data", held_out, "--train_file", train, "--max_train_samples", "30", *HEALING]
    cli.main(["exit", str(tmp_path / "model"), *flags, "--heal", str(tmp_path / "healed")])
    assert len(seen["rows"]) == 30
    words = word_tokenizer().decode(seen["rows"][0]["input_ids"])
    assert words_of(40) in words and words.endswith("w3 w4") == (form == "instructions")

    profile = LayerSetProfile.from_json(str(tmp_path / "model" / "layer_sets.json"))
    short = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    assert short.config.num_hidden_layers == 2 and profile.healed == [False, True]
    assert seen["dtype"] == torch.float32 and short.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--exit_head", "block", "--fewest_layers", "2"], "'block', and nothing is trained"),
        (["--heal", "healed"], "`heal` is 'healed', .* give `fewest_layers`"),
        (["--heal", ".", "--fewest_layers", "2"], "`heal` '.' is not empty; name another"),
        (["--heal", "healed", *HEALING[:-1], "4"], "no layer is left out"),
        (["--heal", "healed", "--fewest_layers", "2"], "`train_file` is not given"),
        (["--heal", "healed", "--fewest_layers", "2"], "several GPUs are visible"),
    ],
)
def test_what_cannot_be_healed_is_refused(words, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spread(llama(num_layers=LAYERS)).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    data = written(tmp_path / "texts.jsonl", [{"text": words_of(row)} for row in range(4)])
    train = ["--train_file", data] if reason == "no layer is left out" else []
    if "GPUs" in reason:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=reason):
        cli.main(["exit", str(tmp_path / "model"), "--data", data, *train, *words])
    assert not (tmp_path / "healed").exists()
