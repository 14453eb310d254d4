"""`hf-descent plan RECIPE`: the memory and operations that a recipe's training will take, and what settings change.

The recipe is one of `sft` or `classify`, whose flags the command takes as well. Only the model's config is read, from
a `config.json` beside the recipe, from the Hub or a folder; no weights and no GPU are needed (`training/planning.py`).
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from accelerate.utils.modeling import convert_file_size_to_int
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.utils import CONFIG_NAME

from ..data.splits import check_arguments
from ..losses.layerwise import DEFAULT_TOKEN_FRACTION as DEFAULT
from ..training.planning import PARTS, PlannedModel, StepCost
from .arguments import HELP, models_of, parse_recipe


USABLE = 0.95  # of a GPU's memory; its context, the libraries' workspaces and fragmentation take the rest
UNPLANNED = (  # settings that change what a step holds, unseen by the plan
    "load_in_4bit", "load_in_8bit", "model_init_kwargs", "packing", "padding_free", "offload", "selective",
    "activation_offloading", "torch_compile", "use_liger_kernel", "label_smoothing_factor", "fsdp", "deepspeed",
)  # fmt: skip


@dataclass
class PlanArguments:
    """Where the training is to run."""

    processes: int = HfArg(default=8, help="GPUs to share the work.")
    gpu_memory: str = HfArg(default="80GiB", help="Memory of each.")

    def __post_init__(self):
        check_arguments(self, {"processes": 1})
        convert_file_size_to_int(self.gpu_memory)  # ValueError where it is no size


def parse(argv: Sequence[str], prog: str, description: str) -> tuple:
    """The training command of the recipe, then the arguments of the plan and of that command."""
    recipes, usage = (
        models_of(argv),
        f"{prog} RECIPE [--processes 8] [--gpu_memory 80GiB] [flags of the recipe]",
    )
    if len(recipes) != 1 and not HELP & {*argv}:
        raise ValueError(f"The recipes are {recipes or 'missing'}: `{usage}`.")
    with (
        open(recipes[0], "rb") if recipes else nullcontext("") as file
    ):  # an error in it names the file
        names = {*(yaml.safe_load(file) or ())}

    def unknown(module) -> int:
        return len(names - {field.name for each in module.argument_types for field in fields(each)})

    module = importlib.import_module("hf_descent.commands.classify")
    if unknown(module) or importlib.util.find_spec(
        "trl"
    ):  # a recipe that suits both is taken for one of `sft`
        module = min(importlib.import_module("hf_descent.commands.sft"), module, key=unknown)
    flags = (
        ["--config", *recipes, *argv[1:], "--use_cpu", "true", "--tf32", "false"]
        if recipes
        else argv
    )
    plan_args, model_args, *others = parse_recipe(
        (PlanArguments, *module.argument_types),
        flags,
        prog=prog,
        usage=usage,
        description=description,
    )
    model_args.model_name_or_path = config_folder(model_args.model_name_or_path, recipes[0])
    return module, plan_args, model_args, *others


def config_folder(name: str | None, recipe: str) -> str | None:
    """Where the config of the model `name` is read: beside the recipe that names it, where there is one, since the Hub
    may be out of reach and the model gated; else where the model is."""
    folder = os.path.dirname(os.path.abspath(recipe))
    named = (yaml.safe_load(Path(recipe).read_text(encoding="utf-8")) or {}).get(
        "model_name_or_path"
    )
    is_beside = os.path.isfile(os.path.join(folder, CONFIG_NAME))
    return folder if is_beside and name == named and not os.path.isdir(name) else name


def run(module, plan_args: PlanArguments, model_args: Any, data_args: Any, args: Any) -> None:
    """Prints the plan: a step as configured, and with other settings."""
    given = {**vars(model_args), **vars(args), **(args.activation_checkpointing_kwargs or {})}
    unplanned = [name for name in UNPLANNED if given.get(name)]
    unplanned += (
        ["optim"] if "bit" in args.optim else []
    )  # those of other libraries, paged or in few bits
    unplanned += ["attn_implementation"] if given.get("attn_implementation") == "eager" else []
    unplanned += ["loss_type"] if given.get("loss_type", "nll") != "nll" else []
    for name in unplanned:
        raise ValueError(f"`{name}` is {given[name]!r}, which cannot be planned: leave it out.")
    is_lm, rows = hasattr(args, "max_length"), args.per_device_train_batch_size
    if not (length := args.max_length if is_lm else data_args.max_seq_length):
        raise ValueError(
            f"Say how long rows are: set `{'max_length' if is_lm else 'max_seq_length'}`."
        )

    def batch(rows: int) -> dict[str, Any]:
        ids = (
            torch.arange(length).repeat(rows, 1) % 7
        )  # any tokens do; some classifiers count those that end a text
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return given | (
            {"labels": ids, "use_cache": False} if is_lm else {"labels": torch.arange(rows) % 2}
        )

    def planned(model_args: Any) -> PlannedModel:
        return PlannedModel(partial(load, module, model_args), batch(rows), token_statistics=is_lm)

    global cost_of  # where a forked process finds it

    def cost_of(setting: tuple[str, Any]) -> StepCost | None:
        name, value = setting
        with (
            nullcontext() if name == "objective" else suppress(ValueError)
        ):  # not every model can have every setting
            if name == "processes":
                with model.sharded(value) as first:
                    return first.step(batch(rows), args)
            if name == "use_peft":
                return planned(replace(model_args, use_peft=value)).step(batch(rows), args)
            other = replace(args, **{name: value})
            return model.step(batch(other.per_device_train_batch_size), other)

    model = planned(model_args)
    probe = model.probe()
    size, micro_batches = f"{rows} x {length} tokens", args.gradient_accumulation_steps
    size = f"{micro_batches} micro-batches of {size}" if micro_batches > 1 else size
    changes = {"activation_checkpointing": not args.activation_checkpointing}
    if (fraction := getattr(model.layers, "token_fraction", None)) is not None:
        changes["readout_token_fraction"] = (
            1.0 if (args.readout_token_fraction or fraction) < 1 else DEFAULT
        )
    changes |= {"per_device_train_batch_size": 2 * rows, "use_peft": not model_args.use_peft}
    settings = {f"as configured ({size})": ("objective", args.objective)}
    settings["plain training (`objective: erm`)"] = "objective", "erm"
    settings |= {f"`{name}: {value}`": (name, value) for name, value in changes.items()}
    forks = (
        sys.platform == "linux" and not torch.accelerator.is_available()
    )  # else autograd fails in a forked process
    jobs = [*settings.values(), ("processes", plan_args.processes)][
        ::-1
    ]  # the last ones take the longest
    # One thread, since a fork leaves the others behind.
    with (
        ProcessPoolExecutor(2, get_context("fork"), torch.set_num_threads, (1,))
        if forks
        else nullcontext() as pool
    ):
        cost, plain, *_, fsdp2 = found = [
            *(pool.map(cost_of, jobs) if forks else map(cost_of, jobs))
        ][::-1]
    costs, launched = (
        dict(zip(settings, found)),
        model.launched(cost, plan_args.processes) | {"fsdp2": fsdp2},
    )
    costs |= {
        f"`--launch {name}`, {plan_args.processes} processes": each
        for name, each in launched.items()
    }
    costs = {name: each for name, each in costs.items() if each is not None}

    every, trained = (
        model.model.num_parameters(only_trainable=is_on) / 1e6 for is_on in (False, True)
    )
    print(
        f"{type(model.model).__name__}: {model.layers.num_layers} layers, {every:,.1f} million weights, "
        f"{trained:,.1f} of them trained. Planned, not measured: GiB at the peak of a step in each process, "
        f"10^12 operations of a step.\n\n{table(costs, plan_args.gpu_memory)}\n\n"
        f"The step takes {cost.operations.total() / plain.operations.total():.2f} times the operations of plain "
        f"training. The probe before the first step takes {probe / 2**30:.1f} GiB beside the weights. Rows are "
        f"full, and every token has a label. It fits where {1 - USABLE:.0%} of {plan_args.gpu_memory} remain. "
        "Plain training is the stock `Trainer`'s, with the logits of all tokens; `SFTTrainer` makes them in parts. "
        "The `--launch` rows are for bf16 and float32 shards of what is trained; DeepSpeed's have hidden states and "
        "readout in the recipe's precision. What this model cannot have has no row. Rows held out for the multipliers "
        "are not planned: forward passes without gradients."
    )


def table(costs: dict[str, StepCost], gpu_memory: str) -> str:
    """The costs in Markdown, a row each."""
    lines = [
        f"| | {' | '.join(PARTS)} | peak | operations: model | readout | fits |",
        "|---" * (len(PARTS) + 5) + "|",
    ]
    for name, cost in costs.items():
        peak = cost.memory.total()
        cells = [f"{size / 2**30:.1f}" for size in (*(cost.memory[part] for part in PARTS), peak)]
        cells += [f"{cost.operations[part] / 1e12:.3g}" for part in PARTS[3:]]
        fits = peak <= USABLE * convert_file_size_to_int(gpu_memory)
        lines.append(f"| {' | '.join([name, *cells, 'yes' if fits else 'no'])} |")
    return "\n".join(lines)


def load(
    module, args: Any, shape: Callable[[PretrainedConfig], PretrainedConfig]
) -> torch.nn.Module:
    """The model that the command trains, with random weights; of what is pretrained `shape` changes the config."""

    def without_weights(cls, name, *_, config, dtype=None, **__):
        config = shape(config)
        text = config.get_text_config()
        text.pad_token_id = (
            getattr(text, "pad_token_id", None) or 0
        )  # training takes the tokenizer's
        return cls._from_config(config, **({} if dtype in (None, "auto") else {"dtype": dtype}))

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(without_weights)):
        if hasattr(module, "load_model"):
            return module.load_model(args, ["0", "1"])
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype)
    if not args.use_peft:
        return model
    from peft import get_peft_model
    from trl import get_peft_config

    return get_peft_model(model, get_peft_config(args))
