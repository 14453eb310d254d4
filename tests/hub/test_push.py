"""Pushes and pulls over the Hub's protocol, each in a process of its own, against a server on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cards import trained
from hub_server import check_card, serving
from tiny import bert, word_tokenizer

from hf_descent.evaluation import LayerProfile
from hf_descent.hub.push import collect


TESTS = Path(__file__).parents[1]


def run_python(code, hub, cache, *arguments, package=True):
    """A process whose Hub is `hub`; without the package on its path, nothing of ours can be imported."""
    cache.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    environment |= {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))) if package else "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *(["-P"] if package else ["-I"]), "-c", code, *map(str, arguments)], capture_output=True,
        text=True, env=environment, cwd=str(cache), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TRAIN = """
import sys, json
import torch
from peft import LoraConfig, get_peft_model
from tiny import bert, classification_data, config, language_data, llama, word_tokenizer
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


def test_a_card_holds_the_validation_results_of_a_denoiser(tmp_path):
    metrics = {"validation_rmse@0.1": 3.0, "validation_mean_rmse": 4.0}
    trained(tmp_path).save_metrics("validation", metrics)
    card = collect(tmp_path)
    assert (card["split"], card["evaluation"]) == ("validation", metrics)


def test_the_median_ratio_of_a_card_is_that_of_the_profile(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    profile = LayerProfile("accuracy", [1.0, 0.5], [0.5, 0.5], [[1.0, 0.2], [1.0, 0.8]])
    profile.to_json(tmp_path / "layer_profile.json")
    assert collect(tmp_path)["layer_profile"]["ratio_median"] == 0.5 == profile.to_dict()["ratio_median"]


@pytest.mark.slow
def test_a_run_is_pushed_through_failures_and_loads_without_the_package(tmp_path):
    with serving() as hub:
        hub.faults = [("PUT", "/lfs/", 1, 503), ("PUT", "/lfs/", 1, "cut")]
        hub.faults += [("POST", "/preupload/", 1, 500), ("POST", "/info/lfs/", 1, "cut")]
        run_python(TRAIN, hub, tmp_path / "trainer", tmp_path)
        assert all(count == 0 for _, _, count, _ in hub.faults), hub.faults
        files = hub.repos["tester/constrained"]["files"]
        assert {
            "README.md", "config.json", "descent_config.json", "model.safetensors", "model_card.json",
            "noise_curve.json", "noise.png", "layer_profile.json", "layers.png", "tokenizer.json",
        } <= files.keys()  # fmt: skip
        assert not any(name.startswith("checkpoint") or "optimizer" in name for name in files)
        assert hub.repos["tester/constrained"]["commits"][-1] == "End of training"
        assert any("in progress" in title for title in hub.repos["tester/constrained"]["commits"])
        for name, content in files.items():  # what arrived is what lies in the folder
            assert content == (tmp_path / "constrained" / name).read_bytes()
        card = files["README.md"].decode()
        assert check_card(card) == [] and "stanfordnlp/imdb" in card and "accuracy at noise gamma 1" in card
        assert "base_model: tester/base" in hub.repos["tester/adapter"]["files"]["README.md"].decode()
        assert "LABEL_" in run_python(LOAD, hub, tmp_path / "user", tmp_path / "logits.pt", package=False)


OWN_MODELS = """
import torch
from transformers import AutoModelForImageToImage, AutoModelForSequenceClassification, ViTConfig
from hf_descent import models

encoder = ViTConfig(
    hidden_size=48, patch_size=4, image_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
)
for auto, model in (
    (AutoModelForImageToImage, models.UTForVideoDenoising(models.UTConfig(hidden_size=4))),
    (
        AutoModelForSequenceClassification,
        models.UTForSequenceClassification(models.UTConfig(hidden_size=4, vocab_size=5)),
    ),
    (AutoModelForImageToImage, models.DustForVideoDenoising(models.DustConfig(hidden_size=4, dictionary_size=6))),
    (AutoModelForImageToImage, models.ViTForDenoising(models.ViTDenoiserConfig(encoder_config=encoder))),
):
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter)
    name = "tester/" + model.config.model_type + type(model).__name__
    model.push_to_hub(name)
    loaded = auto.from_pretrained(name)
    assert type(loaded) is type(model)
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[key]), key
    print(name)
"""


@pytest.mark.slow
def test_own_models_are_pushed_and_loaded_by_the_auto_classes_without_remote_code(tmp_path):
    with serving() as hub:
        words = run_python(OWN_MODELS, hub, tmp_path / "cache").split()
        names = [word for word in words if word.startswith("tester/")]  # DeepSpeed logs among them
        assert len(names) == 4 and set(names) <= hub.repos.keys()
        for name in names:
            files = hub.repos[name]["files"]
            assert {"config.json", "model.safetensors"} <= files.keys() and b"auto_map" not in files["config.json"]


RECIPE = """
import sys
from hf_descent import cli
cli.main(["classify", *sys.argv[1:], "--push_to_hub", "true", "--hub_model_id", "tester/recipe"])
"""


@pytest.mark.slow
def test_a_recipe_pushes_what_it_measured_after_training(tmp_path):
    bert().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"w{i} w{i + 1}", "label": i % 3}) for i in range(12)))
    settings = {
        "model_name_or_path": tmp_path / "model", "output_dir": tmp_path / "run", "train_file": rows,
        "validation_file": rows, "test_file": rows, "max_steps": 2, "eval_gammas": 0.5, "save_strategy": "no",
        "report_to": "none", "use_cpu": "true", "initial_loss_bound": 1.0, "descent_alpha": 0.3,
        "dual_warmup_steps": 0, "max_seq_length": 8,
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with serving() as hub:
        run_python(RECIPE, hub, tmp_path / "cache", *flags)
        files = hub.repos["tester/recipe"]["files"]
        written = {"all_results.json", "layer_profile.json", "noise_curve.json", "layers.png", "noise.png"}
        assert written <= files.keys()
        assert b"metric, test data" in files["README.md"] and b"at noise gamma 0.5" in files["README.md"]


PUSH = """
import sys
from hf_descent import cli
cli.main(["card", sys.argv[1], "--push_to_hub", "tester/card"])
"""


@pytest.mark.slow
def test_a_commit_that_fails_is_said_and_the_next_push_sends_only_what_is_missing(tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "run" / "adapter_model.bin").write_bytes(b"weights of another format")
    with serving() as hub:
        hub.faults = [("POST", "/commit/", 9, 500)]
        with pytest.raises(AssertionError, match="500 Internal Server Error"):
            run_python(PUSH, hub, tmp_path / "cache", tmp_path / "run")
        assert hub.repos["tester/card"]["files"] == {} and (tmp_path / "run" / "model.safetensors").is_file()
        uploads = hub.count("PUT", "/lfs/", 200)
        assert uploads >= 1
        hub.faults = []
        assert "Uploaded to" in run_python(PUSH, hub, tmp_path / "cache", tmp_path / "run")
        assert hub.count("PUT", "/lfs/", 200) == uploads
        files = hub.repos["tester/card"]["files"]
        assert files["model.safetensors"] == (tmp_path / "run" / "model.safetensors").read_bytes()
        assert "training_args.bin" not in files and "adapter_model.bin" in files
        assert "Uploaded to" in run_python(PUSH, hub, tmp_path / "cache", tmp_path / "run")  # again, unchanged
