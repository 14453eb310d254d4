"""Every recipe parses, every command in the recipes' READMEs parses, and the smoke recipes run."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import load_file
from smoke import ROOT, results_of, smoke_command
from tiny.files import save_tiny_model, write_rows
from tiny.models import bert, llama
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from hf_descent import cli


RECIPES = ROOT / "recipes"
ACCELERATE_CONFIGS = sorted((RECIPES / "accelerate_configs").glob("*.yaml"))
JUDGES = (RECIPES / "alpaca-eval").rglob("*.yaml")  # configurations of another package
OTHERS = {*ACCELERATE_CONFIGS, *JUDGES, RECIPES / "reproduce" / "experiments.yaml"}
CONFIGS = sorted(set(RECIPES.rglob("*.yaml")) - OTHERS)
ARMS = [path.parent for path in CONFIGS if path.name == "descent.yaml"]


def relative(path):
    return str(path.relative_to(ROOT))


# What other tests run, or nobody's to test.
ELSEWHERE = (
    "python -m recipes.reproduce",
    "python3 -m venv ",
    "pip install ",
    "uv run ",
    "hf jobs ",
    "python -m build",
    "python recipes/examples/",
)
READMES = {
    readme: [
        line
        for block in re.findall(r"```bash\n(.*?)```", readme.read_text(), re.DOTALL)
        for line in block.splitlines()
        if not line.startswith(ELSEWHERE)
    ]
    for readme in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(RECIPES.rglob("README.md")),
    )
}
COMMANDS = [line for lines in READMES.values() for line in lines]


def without_launcher(line):
    """The words of a command after `hf-descent`, or after `accelerate launch ... -m hf_descent.cli`."""
    program, *words = shlex.split(line, comments=True)
    if program == "hf-descent":
        return words
    assert [program, words[0]] == ["accelerate", "launch"]
    launch = launch_command_parser().parse_args(words[1:])
    assert (ROOT / launch.config_file).is_file()
    assert launch.module and launch.training_script == "hf_descent.cli"
    return launch.training_script_args


FORMER_COMMANDS = re.compile(r"```text\n.*?```", re.DOTALL)  # of scripts that a named commit has
SCRIPTS = re.compile(
    r"python ((?:recipes/benchmarks|recipes/examples|tests/pipeline)/\w+\.py)([^`]*?)(?:`|\n```)"
)


def test_documented_scripts_have_their_options():
    uses = set()
    for path in READMES:
        uses.update(SCRIPTS.findall(FORMER_COMMANDS.sub("", path.read_text())))
    assert uses
    for script, words in uses:
        source = (ROOT / script).read_text()
        for option in re.findall(r"--(\w+)", words):
            assert re.search(rf"\b{option}\b", source), (script, option)


def test_documented_commands_parse(tmp_path):
    assert COMMANDS
    for line in sorted(set(COMMANDS)):
        print(line)  # shown where it fails
        argv = without_launcher(line)
        if argv[0] == "evaluate":  # looks into the runs for their task
            argv = [word.replace("runs/", f"{tmp_path}/runs/") for word in argv]
            for word in argv:
                if word.startswith(str(tmp_path)):
                    model = llama() if "alpaca" in word else bert()
                    model.save_pretrained(word)
        if "--config" in argv:
            assert (ROOT / argv[argv.index("--config") + 1]).is_file()
        cli.parse_arguments(argv)


def test_documented_runs_have_folders_of_their_own():
    """Of several commands of a README, none finds its output folder taken by another."""
    for readme, lines in READMES.items():
        folders = []
        for line in lines:
            alternative = line.startswith("accelerate") or "path/to/model" in line
            if line.split()[1] in ("classify", "sft", "denoise") and not alternative:
                _, arguments = cli.parse_arguments(without_launcher(line))
                folders.append(arguments[-1].output_dir)
        assert len(set(folders)) == len(folders), readme


def test_every_recipe_is_documented_and_gives_what_it_says():
    for path in CONFIGS:
        name = relative(path)
        lines = [line for line in COMMANDS if name in shlex.split(line, comments=True)]
        assert lines, f"{name} is not documented"
        argv = without_launcher(lines[0])
        _, arguments = cli.parse_arguments(argv)
        parsed = {key: value for dataclass in arguments for key, value in vars(dataclass).items()}
        values = yaml.safe_load(path.read_text())
        written = values.keys() - {word.removeprefix("--") for word in argv}
        assert {key: parsed[key] for key in written} == {key: values[key] for key in written}, name


def test_the_arms_differ_only_where_it_matters():
    def changed(before, after):
        return {
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        }

    for folder in ARMS:
        erm, noise, descent = (
            yaml.safe_load((folder / f"{arm}.yaml").read_text())
            for arm in ("erm", "noise", "descent")
        )
        assert changed(erm, noise) == {"noise_gamma", "output_dir"}, folder
        problem = {
            "initial_loss_bound",
            "negative_weights",
            "resilience",
            "resilience_form",
            "exit_targets",
        }
        problem |= {"readout_token_fraction", "target_margin"}
        allowed = {
            name for name in descent if "dual" in name or "slack" in name or "descent" in name
        }
        assert changed(noise, descent) <= {"objective", "output_dir", *problem, *allowed}, folder
        assert (erm["objective"], noise["objective"], descent["objective"]) == (
            "erm",
            "erm",
            "descent",
        ), folder
        assert erm["noise_gamma"] == 0 < noise["noise_gamma"] == descent["noise_gamma"], folder


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=relative)
def test_accelerate_configs_load(path):
    config = load_config_from_file(str(path))
    kind = path.stem.removesuffix("_multi_node")
    assert config.mixed_precision == ("no" if kind in ("single_gpu", "cpu_ddp", "ddp") else "bf16")
    several_machines = path.stem.endswith("_multi_node")
    assert config.num_machines == (2 if several_machines else 1)
    assert config.num_processes == (
        16 if several_machines else 1 if path.stem == "single_gpu" else 2
    )
    if path.stem != "single_gpu":
        assert config.main_process_port == (
            29500 if several_machines else 0
        )  # 0: a second run finds its own


# ---- the smoke recipes, through the real command line ----


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    save_tiny_model(folder / "distilbert")
    write_rows(folder)
    return folder


@pytest.fixture
def smoke(workplace, tmp_path):
    """Runs the README's command of a smoke recipe, on the tiny model and rows, and gives its output folder."""

    def run(name, *flags):
        argv = smoke_command(f"{name}.yaml")
        rows = workplace / argv[argv.index("--train_file") + 1]
        argv += ["--model_name_or_path", str(workplace / "distilbert"), "--train_file", str(rows)]
        cli.main([*argv, "--output_dir", str(tmp_path / "out"), *flags])
        return tmp_path / "out"

    return run


@pytest.mark.parametrize(
    "path", sorted((RECIPES / "smoke").glob("*.yaml")), ids=lambda path: path.stem
)
def test_smoke_recipes_run(smoke, path, capsys):
    folder = smoke(path.stem)
    recipe, results = yaml.safe_load(path.read_text()), results_of(folder)
    assert results["eval_layer_loss_3"] == pytest.approx(results["eval_loss"], rel=1e-4)
    assert ("train_max_violation" in results) == (recipe["objective"] != "erm")
    profile, curve = results_of(folder, "layer_profile"), results_of(folder, "noise_curve")
    assert profile["losses"] == [results[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]
    assert curve["gammas"] == recipe["eval_gammas"]
    assert curve["values"][0][0] == results["eval_accuracy"]
    printed = capsys.readouterr().out
    scores = [f"{results[f'eval_{name}']:.4f}" for name in ("accuracy", "loss")]
    assert ["validation", *scores] in [line.split() for line in printed.splitlines()]
    assert str(folder) in printed
    assert re.search(r"^VERDICT: (MET|NOT MET|NOT SHOWN), price ", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("Next: `hf-descent card ")


def test_the_saved_model_is_the_evaluated_one(smoke, workplace):
    folder = smoke(
        "imdb-erm", "--validation_file", str(workplace / "train.csv"), "--max_steps", "40"
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [line.rsplit(",", 1) for line in (workplace / "train.csv").read_text().splitlines()[1:]]
    with torch.no_grad():
        logits = model.eval()(
            **tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        ).logits
    right = [
        model.config.id2label[label] == row[1]
        for label, row in zip(logits.argmax(-1).tolist(), rows)
    ]
    assert sum(right) / len(right) == results_of(folder)["eval_accuracy"]


def test_another_readout_runs(smoke, workplace, tmp_path):
    folder = smoke("imdb-descent", "--pooling", "mean_linear", "--max_steps", "4")
    assert len(results_of(folder, "layer_profile")["losses"]) == 3
    command = [
        "evaluate",
        str(folder),
        "--config",
        "recipes/smoke/imdb-descent.yaml",
        "--results_dir",
        str(tmp_path),
    ]
    cli.main(
        [
            *command,
            "--train_file",
            str(workplace / "train.csv"),
            "--draws",
            "1",
            "--eval_gammas",
            "0",
            "1",
        ]
    )
    measured, trained = (
        results_of(path, "noise_curve") for path in (tmp_path / folder.name, folder)
    )
    assert measured["losses"][0][0] == pytest.approx(trained["losses"][0][0], rel=1e-4)
    assert measured["settings"]["sigma"] == pytest.approx(trained["settings"]["sigma"])
    rows = ["--train_file", str(workplace / "train.csv"), "--output_dir", str(tmp_path)]
    cli.main(["exit", str(folder), *rows, "--repeats", "1"])
    assert len(results_of(tmp_path, "exit_profile")["losses"]) == 3


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_an_unrolled_transformer_takes_the_models_embeddings(smoke, workplace, frozen):
    flags = ["--unrolled_layers", "4", "--freeze_embeddings", frozen, "--learning_rate", "0.1"]
    folder = smoke("imdb-descent", "--pooling", "head", "--max_steps", "4", *flags)
    assert len(results_of(folder, "layer_profile")["losses"]) == 4
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert (type(model).__name__, model.config.hidden_size) == ("UTForSequenceClassification", 16)
    command = results_of(folder, "descent_config")["command"]
    assert command["unrolled_layers"] == 4 and command["model_name_or_path"] == "distilbert"
    assert command["train_file"] == "train.csv"
    given = AutoModel.from_pretrained(workplace / "distilbert").get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, given) == (frozen == "true")


@pytest.mark.slow
def test_two_processes_on_a_cpu(workplace, tmp_path):
    launched = [line for line in COMMANDS if line.startswith("accelerate")]
    line = next(line for line in launched if "recipes/smoke/imdb-descent.yaml" in line)
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *shlex.split(line)[1:]]
    words += [
        "--model_name_or_path",
        str(workplace / "distilbert"),
        "--train_file",
        str(workplace / "train.csv"),
    ]
    words += [
        "--per_device_eval_batch_size",
        "4",
    ]  # so that either process sees only some of the held-out rows
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*words, "--output_dir", str(tmp_path / "out")], check=True, env=environment, timeout=300
    )
    recipe = yaml.safe_load((RECIPES / "smoke/imdb-descent.yaml").read_text())
    state = results_of(tmp_path / "out", "trainer_state")
    # Two processes take two batches of the 48 training rows a step.
    assert state["epoch"] == recipe["max_steps"] * 2 * recipe["per_device_train_batch_size"] / 48
    results, curve = results_of(tmp_path / "out"), results_of(tmp_path / "out", "noise_curve")
    assert results["eval_layer_loss_3"] == pytest.approx(results["eval_loss"], rel=1e-4)
    assert curve["losses"][0][0] == pytest.approx(
        results["eval_loss"], rel=1e-4
    )  # of all rows, not one process's


def test_an_output_folder_in_use_is_kept_unless_told_otherwise(smoke):
    with pytest.raises(ValueError, match=r"`exit_targets` is .*9"):  # which leaves the folder free
        smoke("imdb-descent", "--exit_targets", "{9: 0.1}")
    folder = smoke("imdb-descent", "--max_steps", "4", "--save_steps", "2")
    marker = folder / "all_results.json"
    before = marker.read_text()
    with pytest.raises(
        ValueError, match="is not empty: go on with `--resume_from_checkpoint true`"
    ):
        smoke("imdb-descent", "--max_steps", "4")
    assert marker.read_text() == before
    for name in ("README.md", "model_card.json"):
        (folder / name).write_text("{}")
    smoke("imdb-descent", "--max_steps", "4", "--overwrite_output_dir", "--dataloader_drop_last", "true",
          "--per_device_eval_batch_size", "12")  # fmt: skip
    assert not (folder / "README.md").exists()
    results = results_of(folder)
    assert results["eval_loss"] == pytest.approx(
        results_of(folder, "layer_profile")["losses"][-1], rel=1e-4
    )


def test_a_misspelt_metric_is_found_before_training(smoke):
    with pytest.raises(
        ValueError,
        match="`metric_for_best_model` is 'acuracy'; choose 'accuracy', 'feasible_score' or",
    ):
        smoke("imdb-descent", "--metric_for_best_model", "eval_acuracy")


def test_an_interrupted_run_ends_like_a_straight_one(smoke):
    steps = ["--max_steps", "8", "--save_steps", "4", "--dual_warmup_steps", "2"]
    folder = smoke("imdb-descent", *steps)
    straight, results = load_file(folder / "model.safetensors"), results_of(folder)
    (folder / "checkpoint-8").rename(
        folder / "gone"
    )  # as if the run had ended after its first checkpoint
    (folder / "model.safetensors").unlink()
    first_saved = (folder / "checkpoint-4" / "model.safetensors").stat().st_mtime_ns
    smoke("imdb-descent", *steps, "--resume_from_checkpoint", "true")
    resumed, again = load_file(folder / "model.safetensors"), results_of(folder)
    assert (
        folder / "checkpoint-4" / "model.safetensors"
    ).stat().st_mtime_ns == first_saved  # not trained again
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    timings = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    figures = {name for name in results if name.startswith("eval")} - timings
    assert {name: results[name] for name in figures} == {name: again[name] for name in figures}


def test_the_test_rows_are_read_only_after_training(smoke, workplace, tmp_path):
    test = tmp_path / "test.csv"
    test.write_text("text,label\na good film,0\na bad film,1\n")
    folder = smoke(
        "imdb-descent",
        "--test_file",
        str(test),
        "--max_steps",
        "4",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
    )
    results = results_of(folder)
    history = results_of(folder, "trainer_state")["log_history"]
    assert {
        "eval_accuracy",
        "test_accuracy",
        "test_accuracy_auc",
        "test_layer_loss_1",
    } <= results.keys()
    assert any("eval_loss" in entry for entry in history)
    assert not any(name.startswith("test") for entry in history for name in entry)
    assert results_of(folder, "layer_profile")["items"] == 2
