"""Records what training does on tiny models, so that two versions of the package can be compared.

    python tests/trajectories.py record ONE.json          # of the package that Python imports
    PYTHONPATH=OTHER_CHECKOUT python tests/trajectories.py record OTHER.json
    python tests/trajectories.py compare ONE.json OTHER.json

A record holds every number that a run logs (but times), its multipliers and a checksum of each weight. `compare`
prints the cases that differ and by how much, and exits with 1 unless all are equal to the last bit.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from numbers import Number
from pathlib import Path

import torch
from peft import LoraConfig
from tiny.data import classification_data, language_data
from tiny.models import VOCAB, bert, gpt2, llama
from tiny.sft import make
from tiny.training import config
from transformers import T5Config, T5ForConditionalGeneration, set_seed

from hf_descent import (
    DescentConfig,
    DescentTrainer,
    Seq2SeqDescentConfig,
    Seq2SeqDescentTrainer,
    SFTDescentTrainer,
)


ROWS = 400  # of which the second half can move the multipliers: 200 is the least
PAPER = {"descent_alpha": 0.3, "initial_loss_bound": 1.0, "negative_weights": "keep"}
LINE = {"descent_alpha": None, "initial_loss_bound": "auto", "dual_warmup_steps": 2}
CLASSIFIERS = {
    "paper": PAPER,
    "line": LINE,
    "steps": LINE | {"descent_alpha": "steps"},
    "exits and bounds": LINE | {"exit_targets": {1: 0.1}, "loss_targets": {2: 0.5}},
    "erm": {"objective": "erm"},
    "deep supervision": {"objective": "deep_supervision"},
    "layerskip": {"objective": "layerskip"},
    "fixed": PAPER | {"objective": "fixed", "fixed_multipliers": [1.0, 0.5, 0.25]},
    "hinge": PAPER | {"objective": "hinge"},
    "quadratic": PAPER | {"objective": "quadratic", "negative_weights": "detach"},
    "slacks": PAPER | {"resilience": 0.1, "resilience_form": "slack"},
    "weight decay": PAPER | {"resilience": 0.1, "multiplier_max": 0.5},
    "sgd": PAPER | {"dual_optim": "sgd", "dual_learning_rate": 0.5},
    "pi": PAPER | {"dual_optim": "pi", "normalize_weights": True},
    "accumulation": LINE | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "erm, accumulation": {"objective": "erm", "gradient_accumulation_steps": 4},
    "noise": LINE | {"noise_gamma": [0.2, 0.8]},
    "bf16": LINE | {"bf16": True},
    "checkpointing": LINE | {"gradient_checkpointing": True},
    "label smoothing": PAPER | {"label_smoothing_factor": 0.1},
}
LANGUAGE_MODELS = {
    "tiles": LINE,
    "tiles, paper": PAPER,
    "tiles, a part of the tokens": LINE | {"readout_token_fraction": 0.5},
    "tiles, accumulation": LINE | {"gradient_accumulation_steps": 2},
    "tiles, erm": {"objective": "erm"},
}


def without_guard(arguments: dict) -> dict:
    """The arguments, with the guard on the last layer off where this version has one."""
    names = {field.name for field in dataclasses.fields(DescentConfig)}
    if "max_last_layer_rise" not in names:
        return arguments
    return {"max_last_layer_rise": None, **arguments}


def arguments(folder: str, given: dict) -> DescentConfig:
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 8}
    return config(folder, **without_guard(evaluated | given))


def classifier(folder: str, given: dict, **keywords) -> DescentTrainer:
    data = classification_data(ROWS)
    if "dual_dataset" in keywords:
        data = data[: ROWS // 2]
    model = bert(dropout=0.1)
    return DescentTrainer(
        model, arguments(folder, given), train_dataset=data, eval_dataset=data[:40], **keywords
    )


def language_model(folder: str, given: dict) -> DescentTrainer:
    data = language_data(64)
    return DescentTrainer(
        llama(), arguments(folder, given), train_dataset=data, eval_dataset=data[:20]
    )


def shifted_language_model(folder: str, given: dict) -> DescentTrainer:
    data = language_data(64)
    return DescentTrainer(
        gpt2(), arguments(folder, given), train_dataset=data, eval_dataset=data[:20]
    )


def seq2seq(folder: str, given: dict) -> Seq2SeqDescentTrainer:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 3}
    tokens = {"vocab_size": VOCAB, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(num_heads=2, dropout_rate=0.1, **sizes, **tokens))
    config = Seq2SeqDescentConfig.from_training_arguments(arguments(folder, given))
    data = language_data(64)
    return Seq2SeqDescentTrainer(model, config, train_dataset=data, eval_dataset=data[:20])


def fine_tuning(folder: str, given: dict, **keywords) -> SFTDescentTrainer:
    return make(SFTDescentTrainer, folder, **without_guard(given), **keywords)


def cases() -> Iterator[tuple[str, Callable, dict, dict]]:
    """Name, function that makes the trainer, settings, and further arguments of that function."""
    for name, given in CLASSIFIERS.items():
        yield f"classifier: {name}", classifier, given, {}
    yield "classifier: readout", classifier, LINE, {"readout": "mean"}
    held_out = classification_data(ROWS)[ROWS // 2 :]
    yield (
        "classifier: held-out rows",
        classifier,
        LINE | {"max_steps": 17},
        {"dual_dataset": held_out},
    )
    for name, given in LANGUAGE_MODELS.items():
        yield f"language model: {name}", language_model, given, {}
    yield "language model: GPT-2", shifted_language_model, LINE, {}
    yield "seq2seq", seq2seq, LINE, {}
    yield "sft", fine_tuning, {}, {}
    yield "sft, erm", fine_tuning, {"objective": "erm"}, {}
    yield "sft, adapters", fine_tuning, {}, {"peft_config": LoraConfig(r=2)}


def numbers(entry: dict) -> dict[str, float]:
    """The numbers of a log entry that another run of the same code gives again."""
    return {
        name: value
        for name, value in entry.items()
        if isinstance(value, Number) and not name.endswith(("runtime", "per_second", "total_flos"))
    }


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()[:12]


def recorded(make: Callable, given: dict, further: dict) -> dict:
    """What one run does."""
    with tempfile.TemporaryDirectory() as folder:
        set_seed(0)
        trainer = make(folder, given, **further)
        trainer.train()
        metrics = numbers(trainer.evaluate())
        profile = trainer.evaluate_layers()
    return {
        "logs": [numbers(entry) for entry in trainer.state.log_history],
        "multipliers": None if trainer.multipliers is None else trainer.multipliers.values.tolist(),
        "metrics": metrics,
        "profile": {"losses": profile.losses.tolist(), "values": profile.values.tolist()},
        "weights": {name: checksum(weight) for name, weight in trainer.model.named_parameters()},
    }


def flat(value, path: str = "") -> dict:
    """A nested record as one level: the path of a value -> the value."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {path: value}
    found = {}
    for name, item in items:
        found.update(flat(item, f"{path}/{name}"))
    return found


def differences(one: dict, other: dict) -> list[str]:
    """Where two records of a case differ, a line each."""
    first = flat(one)
    second = flat(other)
    found = [f"{path}: only in one" for path in sorted(first.keys() ^ second.keys())]
    for path in first.keys() & second.keys():
        before = first[path]
        after = second[path]
        same = before == after or (
            before != before and after != after
        )  # NaN is not equal to itself
        if not same:
            found.append(f"{path}: {before} {after}")
    return sorted(found)


def compare(one: Path, other: Path) -> bool:
    """Print what differs between two records; whether nothing does."""
    first = json.loads(one.read_text())
    second = json.loads(other.read_text())
    equal = True
    for name in sorted(first.keys() | second.keys()):
        found = differences(first.get(name, {}), second.get(name, {}))
        if not found:
            print(f"equal   {name}")
            continue
        equal = False
        print(f"DIFFERS {name}: {len(found)} values", *found[:6], sep="\n    ")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("file", type=Path)
    record.add_argument("--only", default="", help="record the cases whose name holds this text")
    pair = commands.add_parser("compare")
    pair.add_argument("one", type=Path)
    pair.add_argument("other", type=Path)
    given = parser.parse_args()

    if given.command == "compare":
        sys.exit(0 if compare(given.one, given.other) else 1)
    torch.set_num_threads(1)
    found = {
        name: recorded(make, settings, further)
        for name, make, settings, further in cases()
        if given.only in name
    }
    given.file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
