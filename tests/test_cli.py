"""The command line's grammar: how a recipe and flags become arguments. What commands do is tested with the recipes."""

import configparser
import dataclasses
import importlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import help_pages
import pytest
import yaml
from tiny.models import bert
from transformers.integrations import SwanLabCallback
from transformers.trainer_utils import SaveStrategy

from hf_descent import cli
from hf_descent.commands.arguments import SHORT_HELP, TRAINING, parse_recipe
from hf_descent.commands.closing import next_step
from hf_descent.extras import EXTRAS


@dataclass
class Arguments:
    name: str = field(metadata={"help": "required"})
    rate: float = 0.5
    steps: int = 3
    loud: bool = False
    note: str | None = "given"


def parse(*argv):
    return parse_recipe((Arguments,), argv, prog="hf-descent test")[0]


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults(recipe):
    path = recipe("name: a\nrate: 0.1\nsteps: 7\nloud: true\n")
    assert parse("--config", path) == Arguments("a", 0.1, 7, True)
    assert parse("--config", path, "--name", "b", "--steps=9", "--loud", "false") == Arguments(
        "b", 0.1, 9, False
    )
    assert parse("--steps", "9", "--config", path) == Arguments("a", 0.1, 9, True)
    assert parse("--name", "a") == Arguments("a")


def test_recipe_values_take_the_type_of_their_field(recipe):
    # YAML 1.1 reads a number without a point, such as 1e-5, as a string.
    arguments = parse("--config", recipe("name: a\nrate: 1e-5\nnote: null\n"))
    assert arguments.rate == 1e-5
    assert arguments.note is None


def test_unknown_names_are_listed(recipe):
    with pytest.raises(
        ValueError,
        match=r"recipe.yaml sets \['rates', 'stepz'\], which `hf-descent test` does not have",
    ):
        parse("--config", recipe("name: a\nstepz: 1\nrates: 2\n"))
    with pytest.raises(
        ValueError, match=r"`hf-descent test` does not have \['--rates', '2'\]: check the spelling"
    ):
        parse("--name", "a", "--rates", "2")
    with pytest.raises(ValueError, match="--ra"):  # no guessing from abbreviations
        parse("--name", "a", "--ra", "2")


@dataclass
class Kinds(Arguments):
    """As Trainer's and the commands' own."""

    strategy: SaveStrategy | str = "steps"
    files: list[str] | None = None
    column: str = "text"
    kwargs: dict | str | None = None


def test_values_of_a_recipe_are_read_as_flags_or_refused_by_name(recipe):
    def read(text):
        return parse_recipe(
            (Kinds,), ["--config", recipe(f"name: a\n{text}\n")], prog="hf-descent test"
        )[0]

    assert read("strategy: no").strategy == "no"  # which is False in YAML
    assert (read("column: 3").column, read("files: a.avi").files) == ("3", ["a.avi"])
    assert type(read("rate: 1").rate) is float
    assert (read("kwargs: {a: 1}").kwargs, read("files: [a, b]").files) == ({"a": 1}, ["a", "b"])
    for line in ("rate: [1]", "column: null", "column: [a]", "steps: {a: 1}", "files: {a: 1}"):
        with pytest.raises(
            ValueError, match=f"recipe.yaml sets `{line.split(':')[0]}` to .*; give a single value"
        ):
            read(line)
    with pytest.raises(ValueError, match="--steps: invalid int value: '1.5'"):
        read("steps: 1.5")


def test_unreadable_recipes_are_named(recipe):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        parse("--config", "nowhere.yaml")
    for text in ("- name\n", "name\n", "", "1: 2\n"):
        with pytest.raises(ValueError, match="must hold lines of the form"):
            parse("--config", recipe(text))
    with pytest.raises(yaml.YAMLError, match=r"recipe\.yaml"):
        parse("--config", recipe("a: b: c\n"))


def test_a_recipe_runs_no_code(recipe, tmp_path):
    with pytest.raises(Exception, match="could not determine a constructor"):
        parse("--config", recipe(f"name: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n"))
    assert not (tmp_path / "made").exists()


def shown(capsys, *words):
    """What a command line that asks for no more than to be told something prints."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_unknown_command_and_help(capsys):
    with pytest.raises(ValueError, match="invalid choice: 'train'"):
        cli.main(["train"])
    printed = [shown(capsys, *words) for words in (["--help"], [])]
    assert printed[0] == printed[1] and all(f"  {name} " in printed[0] for name in cli.COMMANDS)


def test_the_version_is_that_of_the_package(capsys):
    assert shown(capsys, "--version") == f"hf_descent {version('hf_descent')}\n"


def test_every_command_has_help(capsys):
    for name, flag in (*((name, "--help") for name in cli.COMMANDS), ("evaluate", "--help_all")):
        printed = shown(capsys, name, flag)
        assert f"usage: hf-descent {name}" in printed
        if name == "evaluate":  # whose help is the whole text
            assert "another `seed`" in printed


def test_the_help_begins_with_the_descent_and_leaves_most_of_trainers_arguments_to_help_all(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (shown(capsys, "classify", flag) for flag in ("--help", "--help_all"))
    assert (
        short.index("--objective")
        < short.index("--pooling")
        < short.index("--text_column")
        < short.index("--seed")
    )
    assert "--adam_beta1" in whole and "--adam_beta1" not in short
    assert "micro-batch" in whole and "micro-batch" not in short
    assert "--slack_restart" in whole and "--slack_restart" not in short
    for printed in (short, whole):  # each flag once
        flags = re.findall(r"^  (--\w+)", printed, re.MULTILINE)
        assert len(flags) == len(set(flags)) and "--exit_targets" in flags
        assert (
            "--no_" not in printed
            and "--text-column" not in printed
            and "default: None" not in printed
        )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_fits_two_screens(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(shown(capsys, name, "--help").splitlines()) <= 80


def test_short_help_is_about_arguments_that_exist():
    modules = [importlib.import_module(f"hf_descent.commands.{name}") for name in TRAINING]
    types = [kind for module in modules for kind in module.argument_types]
    names = {field.name for kind in types for field in dataclasses.fields(kind)}
    assert {*SHORT_HELP} <= names


@pytest.mark.parametrize("name", sorted({*cli.COMMANDS} - {"show"}))  # a page
def test_every_command_ends_with_the_next_one(name):
    source = (Path(cli.__file__).parent / "commands" / f"{name}.py").read_text()
    assert "next_step(" in source or "import OutputArguments, report" in source


@pytest.mark.parametrize("command", ["evaluate", "demo"])
def test_a_command_of_one_process_is_not_run_in_several(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match=f"`hf-descent {command}` works in one process"):
        cli.parse_arguments([command, "RUN"])


def test_the_next_step_is_a_command():
    assert (
        next_step("card out", "writes the model card")
        == "Next: `hf-descent card out` writes the model card."
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("classify --config nowhere.yaml", "nowhere.yaml"),
        ("classify --max_steps two", "--max_steps"),
        ("compare run --mistyped", "--mistyped"),
    ],
)
def test_an_error_of_the_user_is_one_line(words, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf-descent", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.console()
    assert end.value.code == 2

    printed = capsys.readouterr().err
    (line,) = [line for line in printed.splitlines() if line.startswith("hf-descent: error:")]
    assert named in line
    assert "usage:" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(("debug", "status"), [([], 2), (["--debug"], 1)])
def test_an_error_of_the_user_has_a_traceback_where_it_is_asked_for(debug, status):
    words = ["-m", "hf_descent.cli", *debug, "classify", "--config", "nowhere.yaml"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("Traceback" in done.stderr) == bool(debug)


HELP_WITHOUT_TORCH = """
import sys
from hf_descent import cli
asked = [[], ["--help"], ["--version"]]
asked += [[name, flag] for name in cli.COMMANDS for flag in ("--help", "-h")]
for words in asked:
    try:
        cli.main(words)
    except SystemExit as end:
        assert end.code == 0, words
    assert not {"torch", "transformers", "numpy"} & set(sys.modules), words
print(len(asked))
"""


def test_help_needs_neither_torch_nor_transformers():
    words = [sys.executable, "-c", HELP_WITHOUT_TORCH]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(3 + 2 * len(cli.COMMANDS))


def installed_as_pinned(*names):
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    return all(f"{name}=={version(name)}" in lines for name in names)


@pytest.mark.skipif(
    not installed_as_pinned("transformers", "trl"), reason="the stored help is of pinned releases"
)
@pytest.mark.parametrize("command", help_pages.STORED, ids=lambda command: command.name)
def test_stored_help_is_that_of_the_parser(command):
    stored = command.help_page.read_text(encoding="utf-8")
    # Releases of Python wrap lines differently.
    assert stored.split() == help_pages.help_of(command).split(), "run `python tests/help_pages.py`"


def test_help_beside_a_recipe_shows_its_values(capsys, recipe):
    assert "(default: 0.25)" not in shown(capsys, "classify", "--help")
    path = recipe("descent_strength: 0.25\n")
    assert "(default: 0.25)" in shown(capsys, "classify", "--config", path, "--help")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_a_module_with_these_functions(name):
    module = importlib.import_module(f"hf_descent.commands.{name}")
    parses = cli.COMMANDS[name].add_flags is not None
    assert callable(module.run) and hasattr(module, "parse") != parses


@pytest.mark.slow
def test_help_without_what_the_extras_install():
    code = (
        "import sys\nsys.modules.update(trl=None, peft=None, optuna=None, av=None)\nfrom hf_descent import cli\n"
        "for command in cli.COMMANDS:\n    sys.argv = ['hf-descent', command, '--help_all']\n"
        "    if cli.COMMANDS[command].add_flags:\n        sys.argv[-1] = '--help'\n"
        "    try:\n        cli.console()\n    except SystemExit as end:\n        print('ended', command, end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    ended = dict(re.findall(r"^ended (\w+) (\d)$", done.stdout, re.MULTILINE))
    assert ended == {command: "2" if command == "sft" else "0" for command in cli.COMMANDS}
    assert "`pip install 'hf_descent[sft]'`" in done.stderr


def test_every_extra_of_a_command_is_one_of_setup_cfg():
    setup = configparser.ConfigParser()
    setup.read(Path(cli.__file__).parents[1] / "setup.cfg")
    extras = setup["options.extras_require"]
    names = {"sklearn": "scikit-learn", "dp_accounting": "dp-accounting"}
    for module, extra in EXTRAS.items():
        packages = re.findall(r"^[\w-]+", extras[extra], re.MULTILINE)
        assert names.get(module, module) in packages, module


@pytest.mark.parametrize("command", ["show", "export", "exit"])
def test_a_run_that_is_not_there_is_named(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    flags = ["--layer", "1", "--output_dir", "out"] if command == "export" else []
    for name in ("runs/mistyped", "runs/imdb/mistyped"):
        with pytest.raises(ValueError, match=f"There is no folder '{name}'"):
            cli.main([command, name, *flags])


@pytest.mark.parametrize("command", ["classify", "sft", "compare"])
def test_a_model_that_is_not_there_is_named(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--model_name_or_path",
        "mistyped",
        "--output_dir",
        "out",
        "--report_to",
        "none",
        "--use_cpu",
        "true",
    ]
    words = ["mistyped"] if command == "compare" else flags
    with pytest.raises(ValueError, match="'mistyped'"):
        cli.main([command, *words])


def test_what_trainer_raises_for_a_metric_or_a_tracker_that_is_not_there_is_one_line(
    monkeypatch, capsys
):
    for fault, line in (
        (lambda: {}["eval_f2"], "error: 'eval_f2'"),
        (SwanLabCallback, "`pip install swanlab`"),
    ):
        monkeypatch.setattr(cli, "main", fault)
        with pytest.raises(SystemExit) as end:
            cli.console()
        assert end.value.code == 2 and line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag"), [("evaluate", "--results_dir"), ("exit", "--output_dir")]
)
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path, command, flag
):
    bert().save_pretrained(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"{tmp_path}/file"):
        cli.main([command, str(tmp_path / "run"), flag, str(tmp_path / "file")])


def test_no_module_imports_a_command_and_no_command_another():
    for path in Path(cli.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.parent.name == "commands":
            assert set(re.findall(r"^ *from \.(\w+) import", source, re.MULTILINE)) <= {
                "arguments",
                "closing",
                "held_out",
                "training",
            }, path
        elif path.name != "cli.py":
            assert not re.search(r"^ *(from|import) .*\bcommands\b", source, re.MULTILINE), path
