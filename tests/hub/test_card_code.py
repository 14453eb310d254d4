"""The code that a card shows loads the model and runs."""

import re

import pytest
import torch
from cards import read, trained
from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from transformers import BertForSequenceClassification

from hf_descent import DescentTrainer, cli
from hf_descent.early_exit import ConfidenceReport, ExitProfile
from hf_descent.hub.render import render
from hf_descent.loading import load_model as load_adapted
from hf_descent.models import LinearReadoutForSequenceClassification


@pytest.mark.parametrize(
    ("architecture", "library", "usage"),
    [
        ("T5ForConditionalGeneration", "transformers", "AutoModelForSeq2SeqLM.from"),
        (
            "WhisperForConditionalGeneration",
            "transformers",
            "import WhisperForConditionalGeneration",
        ),
        ("ViTForImageClassification", "peft", "import AutoPeftModel\n"),
    ],
)
def test_the_class_that_a_card_names_is_one_that_loads_the_model(architecture, library, usage):
    card = {
        "model_name": "m",
        "objective": "erm",
        "library_name": library,
        "paper": DescentTrainer._paper,
    }
    assert usage in str(render(card | {"architecture": architecture}))


def test_adapters_and_own_architectures_are_loaded_as_their_card_says(tmp_path):
    peft = pytest.importorskip("peft")
    from hf_descent.models import LinearReadoutForSequenceClassification

    base = llama()
    base.name_or_path = base.config._name_or_path = "someone/base"
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM"))
    trained(tmp_path / "adapter", model, language_data(8)).create_model_card()
    card, text = read(tmp_path / "adapter")
    assert card.data.to_dict()["library_name"] == "peft" and card.data.base_model == "someone/base"
    assert "AutoPeftModelForCausalLM" in text
    bert().save_pretrained(tmp_path / "encoder")
    own = LinearReadoutForSequenceClassification.from_encoder(
        str(tmp_path / "encoder"), "mean", num_labels=3
    )
    trained(tmp_path / "own", own).create_model_card()
    _, text = read(tmp_path / "own")
    assert "import hf_descent.models" in text and "install hf_descent first" in text
    assert str(tmp_path) not in (tmp_path / "own" / "model_card.json").read_text()
    own.config.encoder_config._name_or_path = "someone/encoder"
    trained(tmp_path / "named", own)
    cli.main(["card", str(tmp_path / "named")])
    assert read(tmp_path / "named")[0].data.base_model == "someone/encoder"


@pytest.mark.parametrize("pooling", ["head", "mean_linear"])
def test_the_code_for_an_adapted_classifier_loads_it_with_all_its_classes(
    pooling, tmp_path, monkeypatch
):
    peft = pytest.importorskip("peft")
    (tmp_path / "someone").mkdir()
    monkeypatch.chdir(tmp_path)
    bert(num_labels=2).bert.save_pretrained("someone/base")
    load = BertForSequenceClassification.from_pretrained
    if pooling != "head":
        load = LinearReadoutForSequenceClassification.from_encoder
    names_of_classes = {0: "a", 1: "b", 2: "c"}
    model = load("someone/base", num_labels=3, id2label=names_of_classes)
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["query"], modules_to_save=["classifier"]
    )
    model = peft.get_peft_model(model, lora).eval()
    trained(tmp_path / "run", model)
    cli.main(["card", "run", "--base_model", "someone/base"])
    card, text = read(tmp_path / "run")
    assert card.data.base_model == "someone/base" and card.data.to_dict()["library_name"] == "peft"
    assert ("install hf_descent first" in text) == (pooling != "head")
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    batch = {"input_ids": torch.arange(12).reshape(2, 6)}
    torch.testing.assert_close(names["model"].eval()(**batch).logits, model.eval()(**batch).logits)
    torch.testing.assert_close(load_adapted("run")(**batch).logits, model(**batch).logits)


def test_the_code_of_a_card_runs(tmp_path, monkeypatch):
    trainer = trained(tmp_path / "run")
    exits = ExitProfile(
        "accuracy", [0.7] * 3, [1] * 3, [1, 2, 3], 8, kept_low=[1] * 3, learned=[True] * 3
    )  # whose first exit is layer 1
    exits.to_json(tmp_path / "run" / "exit_profile.json")
    ConfidenceReport(0.69, 0.7, [0.5, 0.25, 0.25], 2.0, 0.1, 8).to_json(
        tmp_path / "run" / "confidence_exit.json"
    )
    trainer.create_model_card()
    _, text = read(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    rows = classification_data(8)
    real = [row["attention_mask"].bool() for row in rows]
    ragged = [
        {"input_ids": row["input_ids"][mask], "labels": row["labels"]}
        for row, mask in zip(rows, real)
    ]
    names = {"validation_data": ragged}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    assert len(names["short"].bert.encoder.layer) == 1 and names["fast"].threshold is not None
