"""A few steps of SGD, however many processes there are, and what they led to.

`launching.py` starts several processes with one file of jobs, which they do one after another: most of a start is the
import of the libraries.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch


sys.path.insert(0, str(Path(__file__).parent.parent))
from accelerate_on_cpu import keep_sharding_on_cpu
from noisy import vit
from tiny import (
    InOrder,
    bert,
    classification_data,
    config,
    gpt2,
    language_data,
    llama,
    word_tokenizer,
)
from torch.nn import functional as F
from transformers import TrainerCallback

from hf_descent.commands.training import OutputArguments, train_and_report


keep_sharding_on_cpu()


def mean_of_tokens(outputs, labels, num_items_in_batch=None):
    """A loss that ignores the items."""
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def images(count):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    return [{"pixel_values": image, "labels": int(image.mean() > 0)} for image in pixels]


def partly_labelled(count):
    """Language rows of which the second process, or every second micro-batch, gets some batches without a label.

    The first of them is the very first batch, on which the readout is looked for. The label of a first token, which
    nothing predicts, counts for nothing, but keeps TRL from dropping the row.
    """
    rows = language_data(count)
    for row in [*rows[4:8], *rows[12:16]]:
        row["labels"][1:] = -100
        row["labels"][0] = row["input_ids"][0]
    return rows


def with_another_label_from(first, rows):
    """The rows, all with the label 0, which is soon learned, and from row `first` on with the label 1."""
    return [{**row, "labels": int(index >= first)} for index, row in enumerate(rows)]


def sft_trainer(model, output, settings, data, lora):
    from datasets import Dataset

    from hf_descent import SFTDescentConfig, SFTDescentTrainer

    class SFTInOrder(SFTDescentTrainer):
        _get_train_sampler = InOrder._get_train_sampler

    args = SFTDescentConfig(
        **{
            **config(output).to_dict(),
            "bf16": False,
            "gradient_checkpointing": False,
            "max_length": None,
            **settings,
        }
    )
    rows = Dataset.from_list(
        [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in data]
    )
    held_out = rows.select(range(31))
    return SFTInOrder(
        model,
        args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=word_tokenizer(),
        peft_config=lora,
    )


class Poison(TrainerCallback):
    """In the second process alone: a hidden state that is not finite, or another multiplier, from a step on."""

    def __init__(self, kind, step):
        self.kind, self.step = kind, step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if args.process_index == 1 and state.global_step == self.step:
            if self.kind == "multiplier":
                self.trainer.multipliers.values += 0.1
            else:
                layer = model.get_submodule("bert.encoder.layer.1")
                layer.register_forward_hook(lambda module, args, output: output * float("nan"))


def recorded_noise(model):
    """What is added to the embeddings of each forward that is perturbed; the first hook on them sees them clean."""
    clean, noise = [], []

    def record(module, args):
        added = args[0].detach() - clean.pop()
        noise.extend([added] if added.any() else [])

    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: clean.append(output.detach())
    )
    model.model.layers[0].register_forward_pre_hook(record)
    return noise


def train(output, task, batch=8, accumulation=1, **settings):
    """Results, and weights by name; `output` gets the checkpoints."""
    lora, resume, poison, record, model_settings, environment = (
        settings.pop(name, None)
        for name in ("lora", "resume_from", "poison", "record_noise", "model", "environment")
    )
    os.environ.update(environment or {})
    evaluate_first = settings.pop("evaluate_first", False)
    rows = settings.pop("rows", 80)
    dual_rows = settings.pop("dual_rows", 0)
    change = settings.pop("labels_change_at", None)
    model, data = {
        "classification": lambda: (bert(), classification_data(rows)),
        "language": lambda: (llama(**(model_settings or {})), partly_labelled(80)),
        "sft": lambda: (llama(**(model_settings or {})), partly_labelled(80)),
        # Honours `num_items_in_batch` and is read by replay, which none of the others does.
        "image": lambda: (vit(num_hidden_layers=3, intermediate_size=32), images(80)),
        "readout": lambda: (bert(), classification_data(80)),
        "own loss": lambda: (gpt2(), language_data(80)),
    }[task]()
    if change is not None:
        data = with_another_label_from(change, data)
    # Past the pooler, whose parameters then have no gradient.
    readout = {"readout": lambda model, hidden, inputs: model.classifier(hidden[:, 0])}.get(task)
    settings = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 20,
        "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "descent_alpha": 0.4, "dual_optim": "sgd",
        "dual_learning_rate": 0.5, "negative_weights": "keep",
        **settings,
    }  # fmt: skip
    if lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(1)
    noise = recorded_noise(model) if record else []
    if task == "sft":
        trainer = sft_trainer(model, output, settings, data, lora)
    else:
        model = get_peft_model(model, lora) if lora else model
        args = config(output, **settings)
        loss_fn = {"own loss": mean_of_tokens}.get(task)
        trainer = InOrder(
            model,
            args,
            train_dataset=data[dual_rows:],
            eval_dataset=data[-31:] if dual_rows else data[:31],
            dual_dataset=data[:dual_rows] if dual_rows else None,
            readout=readout,
            layer_loss_fn=loss_fn,
        )
    if (
        trainer.is_deepspeed_enabled
    ):  # by its default, ZeRO-3 would leave all of a tiny model in every process
        zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    if poison:
        trainer.add_callback(callback := Poison(*poison))
        callback.trainer = trainer
    if evaluate_first:
        trainer.evaluate()
    nothing = SimpleNamespace()  # beside the trainer's arguments
    train_and_report(trainer, resume, lambda: None, OutputArguments(), nothing)
    metrics = {} if poison else trainer.evaluate()
    if getattr(trainer, "padding_free", False):
        metrics |= trainer.predict(trainer.eval_dataset).metrics
    gather = trainer.accelerator.gather_for_metrics
    values = torch.zeros(3) if trainer.multipliers is None else trainer.multipliers.values
    weights = trainer.accelerator.get_state_dict(
        trainer.model_wrapped
    )  # on all processes, which may have to gather
    for name in environment or {}:
        del os.environ[name]
    return {
        "folder": str(output),
        "processes": trainer.args.world_size,
        "type": trainer.accelerator.distributed_type.value,
        "left_whole": sum(
            getattr(parameter, "ds_persist", False) for parameter in trainer.model.parameters()
        ),
        "steps": gather([trainer.state.global_step], use_gather_object=True),
        "dual_steps": 0 if trainer.multipliers is None else trainer.multipliers.steps.item(),
        "losses": [log["loss"] for log in trainer.state.log_history if "grad_norm" in log],
        "rises": [
            log["last_layer_rise"] for log in trainer.state.log_history if "last_layer_rise" in log
        ],
        "path": [log["multiplier_1"] for log in trainer.state.log_history if "multiplier_1" in log],
        "multipliers": gather([values.tolist()], use_gather_object=True),
        "noise": gather([[draw.tolist() for draw in noise]], use_gather_object=True),
        "eval": [
            value for name, value in sorted(metrics.items()) if name.startswith("eval_layer_loss")
        ],
        "metrics": metrics,
        "problem": trainer.problem.state_dict() if trainer.problem else {"alpha": 0.0},
        "sigma": getattr(model.config, "noise_sigma", None),
    }, {name: weight.clone() for name, weight in (weights or {}).items()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, (settings, arguments) in json.loads((folder / "jobs.json").read_text()).items():
        result, weights = train(folder / name, *settings, **arguments)
        if int(os.environ["RANK"]) == 0:
            (folder / name).mkdir(exist_ok=True)
            torch.save(weights, folder / name / "weights.pt")
            (folder / name / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    # Torch's threads can abort the interpreter's end ("terminate called without an active exception"); all is written.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
