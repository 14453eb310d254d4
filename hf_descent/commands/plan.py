"""`hf-descent plan RECIPE`: the memory and operations that a recipe's training will take, and what settings change.

The recipe is one of `sft` or `classify`, whose flags the command takes as well. Only the model's config is read, from
a `config.json` beside the recipe, from the Hub or a folder; no weights and no GPU are needed (`hf_descent/planning`).
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import yaml
from accelerate.utils.modeling import convert_file_size_to_int
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.utils import CONFIG_NAME

from ..data.splits import check_arguments
from ..evaluation.scoring import markdown_table
from ..planning.meter import PARTS
from ..planning.model import StepCost
from ..planning.recipe import PlannedRecipe, Shape
from .arguments import first_word, parse_recipe
from .closing import next_step


USABLE = 0.95  # of a GPU's memory; its context, the libraries' workspaces and fragmentation take the rest
UNPLANNED = (  # settings that change what a step holds, unseen by the plan
    "load_in_4bit", "load_in_8bit", "model_init_kwargs", "packing", "padding_free", "offload", "selective",
    "activation_offloading", "torch_compile", "use_liger_kernel", "label_smoothing_factor", "fsdp", "deepspeed",
)  # fmt: skip


NOTES = """\
- The probe before the first step takes {probe:.1f} GiB beside the weights.
- Every example has the full length, and every token a label. A step fits if {rest:.0%} of {gpu_memory} remain free.
- Plain training is that of the stock `Trainer`, with the logits of all tokens; `SFTTrainer` computes them in parts.
- The `--launch` lines are for bf16 and float32 shards of what is trained. Under DeepSpeed hidden states and readout
  have the recipe's precision.
- What this model cannot have has no line.
- Examples of a `dual_dataset` are not planned. They take forward passes without gradients."""


@dataclass
class PlanArguments:
    """Where to train."""

    processes: int = HfArg(default=8, help="Number of GPUs.")
    gpu_memory: str = HfArg(default="80GiB", help="Memory of each GPU.")

    def __post_init__(self):
        check_arguments(self, {"processes": 1})
        convert_file_size_to_int(self.gpu_memory)  # ValueError where it is no size


def parse(argv: Sequence[str], prog: str, description: str) -> tuple:
    """The training command of the recipe, then the arguments of the plan and of that command."""
    usage = f"{prog} RECIPE [--processes 8] [--gpu_memory 80GiB] [flags of the recipe]"
    recipe = first_word(argv, "recipe", usage)
    if recipe is None:
        return _parsed(_command_of(set()), argv, prog, usage, description)

    with open(recipe, "rb") as file:  # an error in it names the file
        values = yaml.safe_load(file)
    if values is None:
        values = {}
    module = _command_of(set(values))
    flags = ["--config", recipe, *argv[1:], "--use_cpu", "true", "--tf32", "false"]
    parsed = _parsed(module, flags, prog, usage, description)
    _read_config_beside(recipe, values, model_args=parsed[2])
    return parsed


def _read_config_beside(recipe: str, values: Mapping[str, Any], model_args: Any) -> None:
    """Take the config of the model that the `values` of a recipe name from a file beside it, where there is one: the
    Hub may be out of reach, and the model gated."""
    folder = os.path.dirname(os.path.abspath(recipe))
    name = model_args.model_name_or_path
    is_beside = os.path.isfile(os.path.join(folder, CONFIG_NAME))
    if is_beside and name == values.get("model_name_or_path") and not os.path.isdir(name):
        model_args.model_name_or_path = folder


def _parsed(module: ModuleType, flags: Sequence[str], prog: str, usage: str, description: str):
    types = (PlanArguments, *module.argument_types)
    values = parse_recipe(types, flags, prog, description, usage)
    return module, *values


def _command_of(names: set[str]) -> ModuleType:
    """The command that knows most of the arguments `names`; of both that know them all, `sft`."""
    classify = importlib.import_module("hf_descent.commands.classify")
    knows_all = not names - _arguments(classify)
    if knows_all and importlib.util.find_spec("trl") is None:
        return classify
    sft = importlib.import_module("hf_descent.commands.sft")
    unknown_to_sft = len(names - _arguments(sft))
    unknown_to_classify = len(names - _arguments(classify))
    return sft if unknown_to_sft <= unknown_to_classify else classify


def _arguments(module: ModuleType) -> set[str]:
    return {field.name for kind in module.argument_types for field in fields(kind)}


def run(module, plan_args: PlanArguments, model_args: Any, data_args: Any, args: Any) -> None:
    """Prints the plan: a step as configured, and with other settings."""
    _check_planned(model_args, args)
    is_language_model = hasattr(args, "max_length")
    length = args.max_length if is_language_model else data_args.max_seq_length
    if not length:
        name = "max_length" if is_language_model else "max_seq_length"
        raise ValueError(f"Say how long examples are: set `{name}`.")

    recipe = PlannedRecipe(partial(load, module), model_args, args, length, is_language_model)
    probe = recipe.model.probe()
    settings = recipe.settings(plan_args.processes)
    costs = [recipe.cost(setting) for setting in settings]
    configured, plain = costs[:2]
    launched = recipe.model.launched(configured, plan_args.processes)

    rows = {setting.title: cost for setting, cost in zip(settings[:-1], costs[:-1])}
    for name, cost in launched.items():
        rows[f"`--launch {name}`, {plan_args.processes} processes"] = cost
    rows[settings[-1].title] = costs[-1]
    rows = {title: cost for title, cost in rows.items() if cost is not None}

    model = recipe.model.model
    every = model.num_parameters() / 1e6
    trained = model.num_parameters(only_trainable=True) / 1e6
    times = configured.operations.total() / plain.operations.total()
    print(
        f"{type(model).__name__}: {recipe.model.layers.num_layers} layers, {every:,.1f} million weights, "
        f"{trained:,.1f} of them trained. Planned, not measured: GiB at the peak of a step in each process, "
        f"10^12 operations of a step.\n\n{table(rows, plan_args.gpu_memory)}\n"
    )

    print(NOTES.format(probe=probe / 2**30, rest=1 - USABLE, gpu_memory=plan_args.gpu_memory))
    verdict = "fits" if _fits(configured, plan_args.gpu_memory) else "does not fit"
    print(
        f"\nAs configured, the step {verdict} into {plan_args.gpu_memory} and takes {times:.2f} times the operations "
        "of plain training."
    )
    command = module.__name__.rpartition(".")[2]
    print(next_step(f"{command} --config RECIPE", "trains it"))


def _check_planned(model_args: Any, args: Any) -> None:
    """ValueError for a setting that changes what a step holds, unseen by the plan."""
    values = dict(vars(model_args))
    values.update(vars(args))
    if args.activation_checkpointing_kwargs:
        values.update(args.activation_checkpointing_kwargs)
    unplanned = [name for name in UNPLANNED if values.get(name)]
    if "bit" in args.optim:  # those of other libraries, paged or in few bits
        unplanned.append("optim")
    if values.get("attn_implementation") == "eager":
        unplanned.append("attn_implementation")

    if values.get("loss_type", "nll") != "nll":
        unplanned.append("loss_type")

    if unplanned:
        name = unplanned[0]
        raise ValueError(f"`{name}` is {values[name]!r}, which cannot be planned: leave it out.")


def table(costs: dict[str, StepCost], gpu_memory: str) -> str:
    """The costs in Markdown, a row each."""
    rows = [["", *PARTS, "peak", "operations: model", "readout", "fits"]]
    for name, cost in costs.items():
        sizes = [cost.memory[part] for part in PARTS]
        sizes.append(cost.memory.total())
        cells = [f"{size / 2**30:.1f}" for size in sizes]
        cells += [f"{cost.operations[part] / 1e12:.3g}" for part in PARTS[3:]]
        cells.append("yes" if _fits(cost, gpu_memory) else "no")
        rows.append([name, *cells])
    return markdown_table(rows)


def _fits(cost: StepCost, gpu_memory: str) -> bool:
    return cost.memory.total() <= USABLE * convert_file_size_to_int(gpu_memory)


def load(module: ModuleType, args: Any, shape: Shape) -> torch.nn.Module:
    """The model that the command trains, with random weights; of what is pretrained `shape` changes the config."""

    def without_weights(cls, name, *_, config, dtype=None, **__):
        config = shape(config)
        text = config.get_text_config()
        if not getattr(text, "pad_token_id", None):  # training takes the tokenizer's
            text.pad_token_id = 0
        options = {} if dtype in (None, "auto") else {"dtype": dtype}
        return cls._from_config(config, **options)

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(without_weights)):
        if hasattr(module, "load_model"):
            return module.load_model(args, ["0", "1"])
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
    if not args.use_peft:
        return model
    from peft import get_peft_model
    from trl import get_peft_config

    return get_peft_model(model, get_peft_config(args))
