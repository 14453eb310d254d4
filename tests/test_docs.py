"""The README, the documentation and the examples say what runs."""

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
from tiny.data import classification_data
from tiny.files import WORDS, save_generator, save_tiny_model
from tiny.models import bert
from tiny.sft import chats
from tiny.tokenizers import word_tokenizer
from tiny.training import config, trained
from transformers import AutoModelForSequenceClassification

import hf_descent
from hf_descent import cli, early_exit, evaluation


README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "recipes/examples"


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def write_table(folder, columns, rows, splits=("train", "validation", "test")):
    folder.mkdir()
    for split in splits:
        (folder / f"{split}.csv").write_text("\n".join([columns, *rows]))


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Tiny models and data sets on disk, as the examples take them."""
    folder = tmp_path_factory.mktemp("examples")
    save_tiny_model(folder / "classifier")
    sides = (WORDS[:3], WORDS[3:6])
    write_table(
        folder / "texts",
        "text,label",
        [f"the film was {sides[i % 2][i % 3]},{i % 2}" for i in range(96)],
    )
    save_generator(folder / "generator", chat=True)
    (folder / "chats").mkdir()
    for split, count in (("train", 16), ("test", 8)):
        chats(count).to_json(folder / "chats" / f"{split}.jsonl")
    build("T5ForConditionalGeneration", T5).save_pretrained(folder / "t5")
    word_tokenizer().save_pretrained(folder / "t5")
    write_table(
        folder / "pairs", "dialogue,summary", [f"w{i} w{i + 1} w5,w{i + 1} w{i}" for i in range(16)]
    )
    return folder


@pytest.fixture
def example(local, tmp_path, monkeypatch, capsys):
    """Runs an example by its own command line, and gives what it printed and its output folder."""

    def run(name, model, data, *flags):
        words = [
            "--model",
            local / model,
            "--dataset",
            local / data,
            "--output_dir",
            tmp_path / "out",
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out, tmp_path / "out"

    return run


def test_text_classification(example):
    printed, folder = example("text_classification", "classifier", "texts", "--max_steps", "4")
    assert "verdict" in printed and "gamma" in printed
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.n_layers == 3


def test_early_exit_cuts_what_held_out_rows_allow(example):
    flags = ["--layer", "2", "--excess", "1", "--max_steps", "150", "--learning_rate", "3e-3"]
    printed, folder = example("early_exit", "classifier", "texts", *flags)
    assert "1 of 1 rows are met" in printed and "layers a sample" in printed
    assert AutoModelForSequenceClassification.from_pretrained(folder / "cut").config.n_layers == 2


def test_early_exit_cuts_nothing_otherwise(example):
    printed, folder = example(
        "early_exit", "classifier", "texts", "--layer", "2", "--max_steps", "2"
    )
    assert "0 of 1 rows are met" in printed and not (folder / "cut").exists()


def test_sft_lora(example):
    printed, folder = example("sft_lora", "generator", "chats", "--max_steps", "2")
    assert "verdict" in printed and "token_accuracy" in printed
    assert (folder / "adapter_model.safetensors").is_file()


def test_seq2seq(example):
    printed, folder = example("seq2seq", "t5", "pairs", "--max_steps", "2")
    assert "verdict" in printed and (folder / "model.safetensors").is_file()


def test_custom_loop(example):
    printed, folder = example("custom_loop", "classifier", "texts")
    assert "rows are met" in printed and (folder / "model.safetensors").is_file()


def test_custom_loss(example):
    printed, _ = example("custom_loss", "classifier", "texts", "--max_steps", "2")
    metrics = eval(printed.strip().splitlines()[-1])
    assert metrics["eval_layer_loss_3"] == pytest.approx(metrics["eval_loss"], rel=1e-4)


@pytest.mark.slow
def test_push_to_hub(local, tmp_path):
    words = [
        "--repo",
        "tester/pushed",
        "--model",
        local / "classifier",
        "--dataset",
        local / "texts",
    ]
    words += ["--output_dir", tmp_path / "out", "--max_steps", "2"]
    with serving() as hub:
        given = (
            os.environ
            | environment(hub, tmp_path)
            | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
        )
        printed = python(EXAMPLES / "push_to_hub.py", *words, env=given)
        files = hub.repos["tester/pushed"]["files"]
    assert "label" in printed.splitlines()[-1]
    assert json.loads(files["descent_config.json"]) and b"noise" in files["README.md"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_name_what_they_need(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 75
    header = re.search(r"^# /// script\n(.*?)^# ///$", text, re.MULTILINE | re.DOTALL)[1]
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    header = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.MULTILINE))
    (needed,), setup = header["dependencies"], configparser.ConfigParser()
    assert needed.startswith("hf_descent")
    assert "uv" not in header["tool"]  # a path would be missing outside a clone
    setup.read(ROOT / "setup.cfg")
    installed = setup["options"]["install_requires"] + setup["options"]["python_requires"]
    assert header["requires-python"] in installed
    for extra in re.findall(r"\[(.*)\]", needed):
        packages = setup["options.extras_require"]
        installed += packages[extra]
        for other in re.findall(r"hf_descent\[(.*)\]", packages[extra]):
            installed += "".join(packages[name] for name in other.split(","))
    for module in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE):
        assert module in {
            *sys.stdlib_module_names,
            "hf_descent",
            *re.findall(r"^[\w-]+", installed, re.MULTILINE),
        }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_start_as_jobs_on_the_hub(path):
    headers = pytest.importorskip("huggingface_hub.cli._uv_script_header")
    header = headers.parse_uv_script_header(path.read_text())
    assert header.flavor in {hardware.value for hardware in SpaceHardware}
    assert header.timeout and header.secrets == (["HF_TOKEN"] if "push" in path.stem else [])


def test_the_script_of_the_readme_ends_in_a_folder_that_the_commands_continue(
    local, tmp_path, monkeypatch, capsys
):
    (script,) = python_blocks(README)
    assert len(re.findall(r"^.", script, re.MULTILINE)) <= 15
    hub_names = {
        "distilbert/distilbert-base-uncased": str(local / "classifier"),
        "cornell-movie-review-data/rotten_tomatoes": str(local / "texts"),
    }
    script = script.replace("num_train_epochs=1, exit_targets={3", "max_steps=4, exit_targets={2")
    commands = re.search(r"goes on from here:\n\n```bash\n(.*?)```", README, re.DOTALL)[1]
    for name, folder in hub_names.items():
        assert name in script
        script = script.replace(name, folder)
        commands = commands.replace(name, folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    exec(script, {})

    assert "exit_2" in capsys.readouterr().out
    lines = commands.replace("--layer 3", "--layer 2").splitlines()
    words = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [command for command, *_ in words] == ["exit", "export", "card", "show"]
    for command, *arguments in words[:-1]:  # `show` waits for a browser
        cli.main([command, *arguments])
    assert json.loads((tmp_path / "out/exit_profile.json").read_text())["losses"]
    assert (
        AutoModelForSequenceClassification.from_pretrained("out/three-layers").config.n_layers == 2
    )
    assert "Early exit" in (tmp_path / "out/README.md").read_text()


# The documents' form: sizes, tables, and numbers that stand in the results


RESULTS = runpy.run_path(str(ROOT / "docs/results_page.py"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
RECIPE_PAGES = sorted((ROOT / "recipes").rglob("README.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES, *RECIPE_PAGES]
LIMITS = {
    ROOT / "README.md": 7_000,
    ROOT / "CHANGELOG.md": 6_000,
    ROOT / "recipes/README.md": 3_000,
    **dict.fromkeys(PAGES, 10_000),
}


def name_of(path):
    return str(path.relative_to(ROOT))


def prose(text):
    """A document without its code, tables and folded commands."""
    text = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("|", "<!--")))


def tables(text):
    """The lines of each table."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [block.splitlines() for block in found]


@pytest.mark.parametrize("path", sorted({*LIMITS, *RECIPE_PAGES}), ids=name_of)
def test_documents_are_short(path):
    assert len(path.read_text()) <= LIMITS.get(path, 2_500)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_begins_with_what_its_reader_can_do(path):
    beginning = path.read_text().split("\n\n")[1]
    starts = {"index.md": "Fine-tune ", "api.md": "On this page you can "}
    assert beginning.startswith(starts.get(path.name, "After this page "))


def test_the_site_and_its_first_page_list_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    first = (ROOT / "docs/index.md").read_text()
    for path in PAGES:
        assert f": {path.name}\n" in navigation
        is_part = path.name.startswith("results_") or path.name == "index.md"
        assert is_part or f"]({path.name})" in first


def test_the_lines_of_the_readme_are_short():
    assert all(len(line) <= 120 for line in prose(README).splitlines())


@pytest.mark.parametrize("path", RESULTS["documents"](), ids=name_of)
def test_generated_tables_are_those_of_the_results(path):
    text = path.read_text()
    assert RESULTS["filled"](text) == text, "run `python docs/results_page.py`"


def test_what_the_readme_buys_and_costs_is_generated():
    section = README.split("## What it buys and costs")[1].split("\n## ")[0]
    marked = re.findall(r"<!-- table (.+?) -->", section)
    assert marked == ["exits", "price", "time"] and len(tables(section)) == len(marked)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_cell_of_a_table_has_one_number(path):
    for _, _, *rows in tables(path.read_text()):
        for row in rows:
            for cell in row.strip("|").split("|"):
                if re.fullmatch(r"\s*\d{4}-\d\d-\d\d\s*", cell):  # a date
                    continue
                values = re.fullmatch(r"[\s\d.,;:/±+-]+", cell)
                assert not values or len(re.findall(r"\d+(?:[.,]\d+)*", cell)) <= 1, row


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_sentences_have_no_dates_and_no_commits(path):
    sentences = re.sub(r"\(`git show .*?`\)", "", prose(path.read_text()))
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", sentences)
    assert not re.search(r"\b(?=[a-f0-9]*\d)(?=\d*[a-f])[a-f0-9]{7}\b", sentences)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("results*.md")), ids=name_of)
def test_numbers_in_the_text_of_the_results_stand_in_a_table_of_the_page(path):
    text = path.read_text()
    found = "\n".join(line for lines in tables(text) for line in lines)
    for number in re.findall(r"\d+\.\d\d+", prose(text)):
        assert number in found or number.rstrip("0") in found or number in KNOWN, number


KNOWN = {"7.06"}  # the loss of guessing, in the note of "SmolLM2, exits"


def test_every_recorded_measurement_says_how_it_was_made():
    for table in RESULTS["lines_of"]("recorded.jsonl"):
        assert table["name"] and table["question"] and table["rows"], table["name"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), table["name"]
        own = {"commit", "date"} & set(table["columns"])
        assert own or table["commit"] or table["date"], table["name"]


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^::: .*?(\w+)$", text, re.MULTILINE)) | set(
        re.findall(r"`(\w+Config)`", text)
    )
    for module in (hf_descent, early_exit, evaluation):
        assert set(module.__all__) <= listed, set(module.__all__) - listed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_the_documentation_runs(page, tmp_path, monkeypatch):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    blocks = python_blocks(text)
    if not blocks:
        return

    monkeypatch.chdir(tmp_path)
    train, validation, test = (classification_data(64, seed=seed) for seed in range(3))
    names = {
        "model": bert(),
        "tokenizer": word_tokenizer(),
        "train": train,
        "validation": validation,
        "test": test,
    }
    for block in blocks:
        if (
            "trainer" in block
        ):  # a new one each time: arguments made by a block reset accelerate's state
            settings = config("run", descent_alpha="line", initial_loss_bound="auto")
            names["trainer"] = trained(
                names["model"],
                settings,
                train_dataset=train,
                eval_dataset=test,
                processing_class=names["tokenizer"],
            )
        exec(block, names)
