"""The folders that a script or a checkpoint leaves, and image classifiers, under the commands that come next."""

import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from peft import LoraConfig, get_peft_model
from PIL import Image as Picture
from tiny.data import classification_data
from tiny.models import bert, spread
from tiny.tokenizers import word_tokenizer
from tiny.training import config, trained
from transformers import (
    AutoModelForImageClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_descent import DescentTrainer, cli, layer_logits
from hf_descent.early_exit import ConfidenceReport, ExitProfile
from hf_descent.loading import load_model
from hf_descent.models import LinearReadoutForSequenceClassification, give_linear_readout


NAMES = ["cat", "dog", "owl"]


def vit(channels=1):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    pictures = {"image_size": 8, "patch_size": 4, "num_channels": channels}
    labels = {
        "id2label": dict(enumerate(NAMES)),
        "label2id": {name: i for i, name in enumerate(NAMES)},
    }
    return ViTForImageClassification(ViTConfig(num_hidden_layers=3, **sizes, **pictures, **labels))


def accuracies(model, pixels, labels):
    with torch.no_grad():
        logits = layer_logits(model.eval(), {"pixel_values": pixels})
    return [(each.argmax(-1) == labels).float().mean().item() for each in logits]


def exits_of(folder, data, *words):
    files = [f"--{split}_file={data}" for split in ("train", "validation", "test")]
    cli.main(["exit", str(folder), *files, "--repeats=1", *words])
    report = ConfidenceReport.from_json(str(folder / "confidence_exit.json"))
    return ExitProfile.from_json(str(folder / "exit_profile.json")), report


def test_exit_reports_an_image_classifier_on_the_numbers_that_it_reads(tmp_path):
    model = spread(vit())
    model.save_pretrained(tmp_path / "model")
    pixels = np.random.default_rng(0).normal(size=(30, 1, 8, 8)).astype("float32")
    labels = torch.arange(30) % 3
    rows = {"pixel_values": pixels.tolist(), "labels": labels.tolist()}
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    columns = ("--image_column=pixel_values", "--label_column=labels")
    profile, report = exits_of(tmp_path / "model", tmp_path / "rows.parquet", *columns)
    expected = accuracies(model, torch.from_numpy(pixels), labels)
    assert profile.values == pytest.approx(expected, abs=1e-6)
    assert report.full_accuracy == pytest.approx(expected[-1], abs=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_exit_prepares_images_by_the_processor_that_is_saved(tmp_path, channels):
    model = spread(vit(channels))
    model.save_pretrained(tmp_path / "model")
    processor = ViTImageProcessor(
        size={"height": 8, "width": 8},
        image_mean=[0.5] * channels,
        image_std=[0.2] * channels,
    )
    processor.save_pretrained(tmp_path / "model")
    draw = np.random.default_rng(0).integers(0, 256, (30, 12, 12, 3)).astype("uint8")
    pictures = [Picture.fromarray(each) for each in draw]
    labels = torch.arange(30) % 3
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES[::-1])})
    numbers = [
        2 - label for label in labels.tolist()
    ]  # the same classes, counted from the other end
    rows = Dataset.from_dict({"image": pictures, "label": numbers}, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    profile, _ = exits_of(tmp_path / "model", tmp_path / "rows.parquet")
    mode = "RGB" if channels == 3 else "L"
    prepared = [processor(each.convert(mode), return_tensors="pt") for each in pictures]
    pixels = torch.cat([each["pixel_values"] for each in prepared])
    assert profile.values == pytest.approx(accuracies(model, pixels, labels), abs=1e-6)

    (tmp_path / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="no image processor is saved with the model"):
        exits_of(tmp_path / "model", tmp_path / "rows.parquet")


def test_export_cuts_an_image_classifier(tmp_path, capsys):
    model = spread(vit())
    model.save_pretrained(tmp_path / "model")
    words = ["--layer", "2", "--output_dir", str(tmp_path / "cut")]
    cli.main(["export", str(tmp_path / "model"), *words])
    assert "AutoModelForImageClassification.from_pretrained" in capsys.readouterr().out
    inputs = {"pixel_values": torch.randn(4, 1, 8, 8)}
    short = AutoModelForImageClassification.from_pretrained(tmp_path / "cut")
    with torch.no_grad():
        torch.testing.assert_close(short(**inputs).logits, layer_logits(model, inputs)[1])
    words = ["--layer", "2", "--output_dir", str(tmp_path / "onnx"), "--format", "onnx"]
    with pytest.raises(ValueError, match="reads images: only texts are exported"):
        cli.main(["export", str(tmp_path / "model"), *words])


@pytest.mark.parametrize(
    "words",
    [
        ("exit",),
        ("show",),
        ("card",),
        ("evaluate",),
        ("export", "--layer", "1", "--output_dir", "cut"),
    ],
)
def test_a_folder_without_a_model_is_said_to_need_one(tmp_path, words):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trained(bert(), config(tmp_path, **settings), train_dataset=classification_data(8))
    command, *others = words
    with pytest.raises(ValueError, match=r"holds no model: .*save_model.*in it: checkpoint-2"):
        cli.main([command, str(tmp_path), *others])


def test_exit_takes_a_checkpoint_of_a_script(tmp_path, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    data = {"train_dataset": classification_data(8), "processing_class": word_tokenizer()}
    trained(bert(), config(tmp_path, **settings), **data)
    rows = [{"text": f"w{i} w{i + 1} w5", "label": i % 3} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--train_file", str(tmp_path / "rows.jsonl"), "--max_seq_length=12", "--repeats=1"]
    words += ["--validation_split_percentage", "40"]
    cli.main(["exit", str(tmp_path / "checkpoint-2"), *words])
    assert "drawn from the training split" in capsys.readouterr().out
    assert (tmp_path / "checkpoint-2" / "exit_profile.json").is_file()


def test_the_targets_of_a_custom_loss_are_not_judged_by_the_model_s_own(tmp_path):
    def focal(outputs, labels, num_items_in_batch=None):
        losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
        return ((1 - (-losses).exp()) * losses).mean()

    data = {"train_dataset": classification_data(8), "processing_class": word_tokenizer()}
    trained(bert(), config(tmp_path), **data, layer_loss_fn=focal).save_model()
    rows = [{"text": f"w{i} w{i + 1} w5", "label": i % 3} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--train_file", str(tmp_path / "rows.jsonl"), "--max_seq_length=12"]
    with pytest.raises(ValueError, match="trained with the loss `focal`, which no file holds"):
        cli.main(["evaluate", str(tmp_path), *words])


def gpt2(folder):
    """A decoder on disk, whose head has no bias."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    gpt2 = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=3, pad_token_id=0))
    gpt2.save_pretrained(folder)
    return GPT2ForSequenceClassification.from_pretrained(folder)


def test_an_adapter_of_a_linear_readout_is_loaded_with_its_layer(tmp_path):
    model = gpt2(tmp_path / "base")
    give_linear_readout(model, "mean")
    settings = {"target_modules": ["c_attn"], "task_type": "SEQ_CLS", "fan_in_fan_out": True}
    model = get_peft_model(model, LoraConfig(**settings, modules_to_save=["classifier"]))
    data = classification_data(16)
    trainer = DescentTrainer(model, config(tmp_path / "run"), train_dataset=data, eval_dataset=data)
    trainer.train()
    measured = torch.tensor(trainer.predict(data).predictions)
    trainer.save_model()
    loaded = load_model(str(tmp_path / "run"))
    assert type(loaded.get_base_model()) is LinearReadoutForSequenceClassification
    batch = {
        name: torch.stack([row[name] for row in data]) for name in ("input_ids", "attention_mask")
    }
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, measured)


def test_an_adapter_without_the_linear_layer_is_refused(tmp_path):
    model = gpt2(tmp_path / "base")
    give_linear_readout(model, "mean")
    model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    trained(model, config(tmp_path / "run"), train_dataset=classification_data(16)).save_model()
    with pytest.raises(ValueError, match=r"does not hold the linear layer.*modules_to_save"):
        load_model(str(tmp_path / "run"))
