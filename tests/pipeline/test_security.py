"""What a downloaded file or a name can make the package do: nothing is unpickled, executed or written elsewhere."""

import ast
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config

from hf_descent import DescentTrainer, SFTDescentConfig
from hf_descent.commands.evaluate import _results_folder
from hf_descent.constraints.saved_state import STATE_NAME, read_state
from hf_descent.runs import RunFolder


ROOT = Path(__file__).parent.parent.parent
SOURCES = [*(ROOT / "hf_descent").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
YAML = [*(ROOT / "recipes").rglob("*.yaml")]
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def dotted(node):
    """The name that a call gives its function, such as "torch.load"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def constant(node):
    """The value of a constant; `None` of any other expression, which may be anything."""
    return node.value if isinstance(node, ast.Constant) else None


def dangers(tree):
    """What in a syntax tree can run the contents of a file or a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from UNSAFE_MODULES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from UNSAFE_MODULES & {node.module.split(".")[0]}
        elif isinstance(node, ast.Call):
            yield from dangers_of_a_call(node)


def dangers_of_a_call(node):
    arguments = {}
    for keyword in node.keywords:
        # The user's own setting, handed on, is no danger: it is off unless given.
        if dotted(keyword.value) != "args.trust_remote_code":
            arguments[keyword.arg] = constant(keyword.value)

    name = dotted(node.func)
    if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
        yield name
    if name == "torch.load" and arguments.get("weights_only") is not True:
        yield name
    if name.startswith("yaml.") and "load" in name and name != "yaml.safe_load":
        yield name
    for argument in ("allow_pickle", "shell", "trust_remote_code"):
        if arguments.get(argument, False) is not False:
            yield argument


def test_the_search_finds_what_it_looks_for():
    code = (
        "import pickle\nfrom dill import loads\neval(x)\ntorch.load(f)\ntorch.load(f, weights_only=False)\n"
        "yaml.load(f)\nnp.load(f, allow_pickle=True)\nsubprocess.run(c, shell=True)\nload(n, trust_remote_code=x)\n"
        "torch.load(f, weights_only=True)\nyaml.safe_load(f)\nmodel.eval()\nre.compile(p)\n"
    )
    found = ["pickle", "dill", "eval", "torch.load", "torch.load", "yaml.load"]
    assert sorted(dangers(ast.parse(code))) == sorted(
        [*found, "allow_pickle", "shell", "trust_remote_code"]
    )


def test_no_source_can_run_what_it_reads():
    assert len(SOURCES) > 50
    found = {path: list(dangers(ast.parse(path.read_text(encoding="utf-8")))) for path in SOURCES}
    assert not {path: names for path, names in found.items() if names}


def test_no_recipe_trusts_remote_code(tmp_path):
    assert SFTDescentConfig(str(tmp_path), use_cpu=True).trust_remote_code is False
    assert not [
        path
        for path in YAML
        if yaml.safe_load(path.read_text(encoding="utf-8")).get("trust_remote_code")
    ]


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_place_of_our_files_is_not_run(tmp_path):
    for name, read in (
        (STATE_NAME, read_state),
        (RunFolder.SUMMARY, lambda folder: RunFolder(folder).summary),
    ):
        torch.save(Payload(tmp_path / "made"), tmp_path / name)
        with pytest.raises(ValueError, match=name):
            read(str(tmp_path))
    assert not (tmp_path / "made").exists()


def test_a_poisoned_optimizer_state_is_not_run(tmp_path):
    def trainer(steps):
        args = config(tmp_path, save_strategy="steps", save_steps=2, max_steps=steps)
        return DescentTrainer(bert(), args, train_dataset=classification_data(16))

    trainer(2).train()
    checkpoint = tmp_path / "checkpoint-2"

    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        before = (checkpoint / name).read_bytes()
        torch.save(Payload(tmp_path / "made"), checkpoint / name)
        with pytest.raises(Exception, match="[Ww]eights.only"):
            trainer(4).train(resume_from_checkpoint=str(checkpoint))
        (checkpoint / name).write_bytes(before)

    assert not (tmp_path / "made").exists()


def test_settings_in_a_state_file_are_data(tmp_path):
    save_file(
        {"averages": torch.zeros(1)},
        tmp_path / STATE_NAME,
        metadata={"state": "__import__('os').getcwd()"},
    )
    with pytest.raises(ValueError, match=STATE_NAME):
        read_state(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["..", "../..", ".", "/", "a/../..", "org/model", "../../etc/model", "a/"]
)
def test_results_stay_in_their_folder(tmp_path, name):
    folder = Path(_results_folder(name, str(tmp_path / "results"))).resolve()
    assert folder.is_relative_to(tmp_path / "results")
