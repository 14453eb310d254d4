"""Pushes and pulls over the Hub's protocol, each in a process of its own, against a server on loopback."""

import json
import os

import pytest
from cards import check_card, trained
from hub_server import environment, serving
from programs import ROOT, python
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer

from hf_descent.hub.facts import write_card


def run_python(code, hub, cache, *arguments, package=True):
    """A process whose Hub is `hub`; without the package on its path, nothing of ours can be imported."""
    cache.mkdir(exist_ok=True)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"))) if package else ""
    given = os.environ | environment(hub, cache) | {"PYTHONPATH": path}
    return python("-P" if package else "-I", "-c", code, *arguments, env=given, cwd=cache)


TRAIN = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer
from tiny.training import config
from transformers import AutoModelForCausalLM
from hf_descent import DescentTrainer

rows, folder = classification_data(16, num_labels=3), sys.argv[1]
arguments = config(
    folder + "/constrained", hub_model_id="tester/constrained", push_to_hub=True, save_strategy="steps", save_steps=3,
    eval_gammas=[0, 1], hub_always_push=True,
)
trainer = DescentTrainer(
    bert(), arguments, train_dataset=rows, eval_dataset=rows, processing_class=word_tokenizer()
)
trainer.train()
trainer.evaluate()
trainer.evaluate_robustness()
trainer.evaluate_layers()
trainer.push_to_hub(dataset="stanfordnlp/imdb", license="apache-2.0")
batch = {"input_ids": torch.arange(12).reshape(2, 6)}
logits = [trainer.model.eval()(**batch).logits]

llama().push_to_hub("tester/base")
model = get_peft_model(AutoModelForCausalLM.from_pretrained("tester/base"), LoraConfig(task_type="CAUSAL_LM"))
trainer = DescentTrainer(
    model, config(folder + "/adapter", hub_model_id="tester/adapter"), train_dataset=language_data(16)
)
trainer.train()
trainer.push_to_hub()
logits.append(model.eval()(**batch).logits)
torch.save([tensor.detach() for tensor in logits], folder + "/logits.pt")
"""

LOAD = """
import sys
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForSequenceClassification, pipeline

batch = {"input_ids": torch.arange(12).reshape(2, 6)}
expected = torch.load(sys.argv[1])
for loader, name, logits in (
    (AutoModelForSequenceClassification, "tester/constrained", expected[0]),
    (AutoPeftModelForCausalLM, "tester/adapter", expected[1]),
):
    with torch.no_grad():
        torch.testing.assert_close(loader.from_pretrained(name).eval()(**batch).logits, logits)
print(pipeline("text-classification", model="tester/constrained")("w1 w2 w3"))
assert not any(name.startswith("hf_descent") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_run_is_pushed_and_loads_without_the_package(tmp_path):
    with serving() as hub:
        run_python(TRAIN, hub, tmp_path / "trainer", tmp_path)
        files, commits = (
            hub.repos["tester/constrained"]["files"],
            hub.repos["tester/constrained"]["commits"],
        )
        assert {
            "README.md", "config.json", "descent_config.json", "model.safetensors", "model_card.json",
            "noise_curve.json", "noise.png", "layer_profile.json", "layers.png", "tokenizer.json",
        } <= files.keys()  # fmt: skip
        assert not any(name.startswith("checkpoint") or "optimizer" in name for name in files)
        assert commits[-1] == "End of training" and any("in progress" in title for title in commits)
        card = files["README.md"].decode()
        assert (
            check_card(card) == []
            and "stanfordnlp/imdb" in card
            and "Gaussian noise on the input" in card
        )
        assert (
            "base_model: tester/base" in hub.repos["tester/adapter"]["files"]["README.md"].decode()
        )
        assert "LABEL_" in run_python(
            LOAD, hub, tmp_path / "user", tmp_path / "logits.pt", package=False
        )


COMMAND = "import sys; from hf_descent import cli; cli.main(sys.argv[1:])"


@pytest.mark.slow
def test_a_recipe_pushes_what_it_measured_after_training(tmp_path):
    bert().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "\n".join(json.dumps({"text": f"w{i} w{i + 1}", "label": i % 3}) for i in range(12))
    )
    settings = {
        "model_name_or_path": tmp_path / "model", "output_dir": tmp_path / "run", "train_file": rows,
        "validation_file": rows, "test_file": rows, "max_steps": 2, "eval_gammas": 0.5, "save_strategy": "no",
        "report_to": "none", "use_cpu": "true", "initial_loss_bound": 1.0, "descent_alpha": 0.3,
        "dual_warmup_steps": 0, "max_seq_length": 8, "push_to_hub": "true", "hub_model_id": "tester/recipe",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with serving() as hub:
        run_python(COMMAND, hub, tmp_path / "cache", "classify", *flags)
        files = hub.repos["tester/recipe"]["files"]
        written = {
            "all_results.json",
            "layer_profile.json",
            "noise_curve.json",
            "layers.png",
            "noise.png",
        }
        assert written <= files.keys()
        assert b"Gaussian noise on the input" in files["README.md"]


@pytest.mark.slow
def test_the_command_uploads_card_and_weights_and_no_state_of_training(tmp_path):
    trained(tmp_path / "run", save_strategy="steps", save_steps=2)
    (tmp_path / "run" / "adapter_model.bin").write_bytes(b"weights of another format")
    with serving() as hub:
        words = ["card", tmp_path / "run", "--push_to_hub", "tester/card"]
        for _ in range(2):  # again, unchanged
            assert "Uploaded to" in run_python(COMMAND, hub, tmp_path / "cache", *words)
        files = hub.repos["tester/card"]["files"]
    assert {"README.md", "model.safetensors", "adapter_model.bin"} <= files.keys()
    assert "training_args.bin" not in files and not any(
        name.startswith("checkpoint") for name in files
    )


def test_a_card_of_version_0_2_no_longer_says_how_to_draft(tmp_path):
    llama(num_layers=3).save_pretrained(tmp_path)
    shown = {"text": "layer 2 drafts", "draft_with": "2, None, length=None"}
    measured = {"acceptance": [0.5, 0.9], "tokens_per_second": [10.0, 30.0]}
    (tmp_path / "speculation_profile.json").write_text(json.dumps(measured))
    old_card = {"license": "mit", "limits": ["A toy."], "speculation_profile": shown}
    (tmp_path / "model_card.json").write_text(json.dumps(old_card))
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    (folder / "generate.py").write_text("from hf_descent.early_exit import draft_with")
    (folder / "requirements.txt").write_text("hf_descent")

    assert "speculation_profile" not in write_card(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "- A toy." in text and "draft" not in text and "custom_generate" not in text
    assert not any(folder.iterdir())
