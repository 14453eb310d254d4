"""The examples and the README's script run on tiny data, and start without this checkout."""

import configparser
import json
import os
import re
import runpy
import shlex
import sys

import pytest
from architectures import T5, build
from hub_server import environment, serving
from huggingface_hub import SpaceHardware
from programs import ROOT, python
from tiny.files import WORDS, save_generator, save_tiny_model
from tiny.sft import chats
from tiny.tokenizers import word_tokenizer
from transformers import AutoModelForSequenceClassification

from hf_descent import cli


README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "recipes/examples"
PATHS = sorted(EXAMPLES.glob("*.py"))


def save_table(folder, columns, rows):
    """The same rows as each part of a data set."""
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.csv").write_text("\n".join([columns, *rows]))


def save_texts(folder):
    sides = (WORDS[:3], WORDS[3:6])
    rows = [f"the film was {sides[row % 2][row % 3]},{row % 2}" for row in range(96)]
    save_table(folder, "text,label", rows)


def save_pairs(folder):
    rows = [f"w{row} w{row + 1} w5,w{row + 1} w{row}" for row in range(16)]
    save_table(folder, "dialogue,summary", rows)


def save_chats(folder):
    folder.mkdir()
    chats(16).to_json(folder / "train.jsonl")
    chats(8).to_json(folder / "test.jsonl")


def save_t5(folder):
    build("T5ForConditionalGeneration", T5).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Tiny models and data sets on disk, as the examples take them."""
    folder = tmp_path_factory.mktemp("examples")
    save_tiny_model(folder / "classifier")
    save_generator(folder / "generator", chat=True)
    save_t5(folder / "t5")
    save_texts(folder / "texts")
    save_chats(folder / "chats")
    save_pairs(folder / "pairs")
    return folder


@pytest.fixture
def example(local, tmp_path, monkeypatch, capsys):
    """Runs an example by its own command line, and gives what it printed and its output folder."""

    def run(name, model, data, *flags):
        output = tmp_path / "out"
        words = [
            name,
            *("--model", local / model),
            *("--dataset", local / data),
            *("--output_dir", output),
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out, output

    return run


# What the examples do


def num_layers(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder).config.n_layers


def test_text_classification_prints_a_verdict_and_a_noise_curve(example):
    printed, folder = example("text_classification", "classifier", "texts", "--max_steps", "4")
    assert "verdict" in printed
    assert "Area under the curve" in printed
    assert num_layers(folder) == 3


def test_early_exit_cuts_what_held_out_rows_allow(example):
    flags = ["--layer", "2", "--excess", "1", "--max_steps", "150", "--learning_rate", "3e-3"]
    printed, folder = example("early_exit", "classifier", "texts", *flags)
    assert "1 of 1 constraints are met" in printed
    assert "layers a sample" in printed
    assert num_layers(folder / "cut") == 2


def test_early_exit_cuts_nothing_otherwise(example):
    flags = ["--layer", "2", "--max_steps", "2"]
    printed, folder = example("early_exit", "classifier", "texts", *flags)
    assert "0 of 1 constraints are met" in printed
    assert not (folder / "cut").exists()


def test_sft_lora_saves_an_adapter(example):
    printed, folder = example("sft_lora", "generator", "chats", "--max_steps", "2")
    assert "verdict" in printed
    assert "token_accuracy" in printed
    assert (folder / "adapter_model.safetensors").is_file()


def test_seq2seq_prints_a_verdict(example):
    printed, folder = example("seq2seq", "t5", "pairs", "--max_steps", "2")
    assert "verdict" in printed
    assert (folder / "model.safetensors").is_file()


def test_custom_loop_tells_what_is_met(example):
    printed, folder = example("custom_loop", "classifier", "texts")
    assert "constraints are met" in printed
    assert (folder / "model.safetensors").is_file()


def test_custom_loss_is_the_loss_of_the_last_layer(example):
    printed, _ = example("custom_loss", "classifier", "texts", "--max_steps", "2")
    metrics = eval(printed.strip().splitlines()[-1])
    assert metrics["eval_layer_loss_3"] == pytest.approx(metrics["eval_loss"], rel=1e-4)


@pytest.mark.slow
def test_push_to_hub_pushes_settings_and_card(local, tmp_path):
    words = [
        *("--repo", "tester/pushed"),
        *("--model", local / "classifier"),
        *("--dataset", local / "texts"),
        *("--output_dir", tmp_path / "out"),
        *("--max_steps", "2"),
    ]
    with serving() as hub:
        variables = {
            **os.environ,
            **environment(hub, tmp_path),
            "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": str(ROOT),
        }
        printed = python(EXAMPLES / "push_to_hub.py", *words, env=variables)
        files = hub.repos["tester/pushed"]["files"]
    assert "label" in printed.splitlines()[-1]
    assert json.loads(files["descent_config.json"])
    assert b"noise" in files["README.md"]


# Their form


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 75


def requirements(extra):
    """What an installation with this extra has, with what that extra takes of others; no extra for ""."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"]
    if extra:
        own = setup["options.extras_require"][extra]
        lines += own
        for others in re.findall(r"hf_descent\[(.*)\]", own):
            for other in others.split(","):
                lines += setup["options.extras_require"][other]
    return set(re.findall(r"^[\w-]+", lines, re.MULTILINE))


def header_of(path):
    """What a script says of itself to the tools that start it."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    header = re.search(r"^# /// script\n(.*?)^# ///$", path.read_text(), re.MULTILINE | re.DOTALL)
    return tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_examples_name_what_they_need(path):
    header = header_of(path)
    (needed,) = header["dependencies"]
    name, extra = re.match(r"(\w+)(?:\[(.*?)\])?", needed).groups()
    assert name == "hf_descent"

    known = {*sys.stdlib_module_names, "hf_descent", *requirements(extra)}
    imported = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    assert set(imported) <= known


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_examples_start_outside_of_a_checkout(path):
    header = header_of(path)
    assert "uv" not in header["tool"]  # a path would be missing outside a clone

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert header["requires-python"] == setup["options"]["python_requires"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_examples_start_as_jobs_on_the_hub(path):
    headers = pytest.importorskip("huggingface_hub.cli._uv_script_header")
    header = headers.parse_uv_script_header(path.read_text())
    assert header.flavor in {hardware.value for hardware in SpaceHardware}
    assert header.timeout
    assert header.secrets == (["HF_TOKEN"] if "push" in path.stem else [])


# The script of the README, and the commands behind it


HUB_NAMES = {
    "sentence-transformers/all-MiniLM-L6-v2": "classifier",
    "cornell-movie-review-data/rotten_tomatoes": "texts",
}


def readme_script():
    (script,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return script


def with_local_names(text, local):
    """A text of the README whose model and data lie on disk."""
    for name, folder in HUB_NAMES.items():
        text = text.replace(name, str(local / folder))
    return text


def test_the_script_of_the_readme_is_short():
    script = readme_script()
    assert len(re.findall(r"^.", script, re.MULTILINE)) <= 15
    assert all(name in script for name in HUB_NAMES)


def test_the_script_of_the_readme_ends_in_a_folder_that_the_commands_continue(
    local, tmp_path, monkeypatch, capsys
):
    # The tiny model has three layers, so that an exit can be at the second one.
    script = readme_script().replace("num_train_epochs=1", "max_steps=4")
    script = script.replace("exit_targets={3", "exit_targets={2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    exec(with_local_names(script, local), {})
    assert "exit_2" in capsys.readouterr().out

    block = re.search(r"Use the saved folder:\n\n```bash\n(.*?)```", README, re.DOTALL)[1]
    lines = with_local_names(block.replace("--layer 3", "--layer 2"), local).splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [command[0] for command in commands] == ["exit", "export", "card", "show"]
    for command in commands[:-1]:  # `show` waits for a browser
        cli.main(command)
    assert json.loads((tmp_path / "out/exit_profile.json").read_text())["losses"]
    assert "\nVERDICT: NOT " in capsys.readouterr().out
    config = json.loads((tmp_path / "out/three-layers/config.json").read_text())
    assert config["model_type"] == "linear_readout"  # of `readout="mean"`
    assert config["encoder_config"]["n_layers"] == 2
    assert "Early exit" in (tmp_path / "out/README.md").read_text()
