"""A few steps of SGD, however many processes there are, and what they led to.

`launching.py` starts several processes with one file of jobs, which they do one after another: most of a start is the
import of the libraries.
"""

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import torch


sys.path.insert(0, str(Path(__file__).parent.parent))
from accelerate_on_cpu import keep_sharding_on_cpu
from noisy import vit
from tiny.data import classification_data, language_data
from tiny.models import bert, gpt2, llama
from tiny.tokenizers import word_tokenizer
from tiny.training import InOrder, config
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
    """The rows, at first all with the label 0, which is soon learned, and from row `first` on with their own."""
    return [*({**row, "labels": 0} for row in rows[:first]), *rows[first:]]


class Poison(TrainerCallback):
    """In the second process alone: a hidden state that is not finite, or another multiplier, from a step on."""

    def __init__(self, kind, step, trainer):
        self.kind = kind
        self.step = step
        self.trainer = trainer

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if args.process_index == 1 and state.global_step == self.step:
            if self.kind == "multiplier":
                self.trainer.multipliers.values += 0.1
            else:
                layer = model.get_submodule("bert.encoder.layer.1")
                layer.register_forward_hook(lambda module, args, output: output * float("nan"))


def recorded_noise(model):
    """What is added to the embeddings of each forward that is perturbed; the first hook on them sees them clean."""
    clean = []
    noise = []

    def keep_clean(module, args, output):
        clean.append(output.detach())

    def keep_noise(module, args):
        added = args[0].detach() - clean.pop()
        if added.any():
            noise.append(added)

    model.get_input_embeddings().register_forward_hook(keep_clean)
    model.model.layers[0].register_forward_pre_hook(keep_noise)
    return noise


def model_and_data(task, rows, model_settings):
    """A model, the same on all processes, and training data."""
    match task:
        case "classification":
            return bert(), classification_data(rows)
        case "language" | "sft":
            return llama(**model_settings), partly_labelled(80)
        case "image":
            # The only one that honours `num_items_in_batch` and is read by replay.
            return vit(num_hidden_layers=3, intermediate_size=32), images(80)
        case "readout":
            return bert(), classification_data(80)
        case "own loss":
            return gpt2(), language_data(80)
    raise ValueError(f"There is no task {task!r}.")


def past_the_pooler(model, hidden, inputs):
    """A readout that leaves the parameters of the pooler without a gradient."""
    return model.classifier(hidden[:, 0])


def adapters():
    from peft import LoraConfig

    torch.manual_seed(1)
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def in_order_trainer(model, args, data, dual_rows, task):
    """A trainer that takes the rows in their order; the multipliers move on the first `dual_rows` of them."""
    keywords = {}
    if task == "readout":
        keywords["readout"] = past_the_pooler
    if task == "own loss":
        keywords["layer_loss_fn"] = mean_of_tokens

    if not dual_rows:
        return InOrder(model, args, train_dataset=data, eval_dataset=data[:31], **keywords)
    return InOrder(
        model,
        args,
        train_dataset=data[dual_rows:],
        dual_dataset=data[:dual_rows],
        eval_dataset=data[-31:],
        **keywords,
    )


def sft_trainer(model, args, data, peft_config):
    """TRL's trainer on the same rows, in their order."""
    from datasets import Dataset

    from hf_descent import SFTDescentConfig, SFTDescentTrainer

    class SFTInOrder(SFTDescentTrainer):
        _get_train_sampler = InOrder._get_train_sampler

    rows = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in data]
    rows = Dataset.from_list(rows)
    return SFTInOrder(
        model,
        SFTDescentConfig(**args),
        train_dataset=rows,
        eval_dataset=rows.select(range(31)),
        processing_class=word_tokenizer(),
        peft_config=peft_config,
    )


def make_trainer(task, model, output, settings, data, dual_rows, lora):
    """The trainer of a task, with arguments that the settings change."""
    defaults = {
        "max_steps": 20,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "descent_alpha": 0.4,
        "dual_optim": "sgd",
        "dual_learning_rate": 0.5,
        "negative_weights": "keep",
    }
    if task == "sft":
        of_sft = {"bf16": False, "gradient_checkpointing": False, "max_length": None}
        args = {**config(output).to_dict(), **defaults, **of_sft, **settings}
        trainer = sft_trainer(model, args, data, adapters() if lora else None)
    else:
        if lora:
            from peft import get_peft_model

            model = get_peft_model(model, adapters())
        args = config(output, **{**defaults, **settings})
        trainer = in_order_trainer(model, args, data, dual_rows, task)

    if trainer.is_deepspeed_enabled:
        # By its default, ZeRO-3 would leave all of a tiny model in every process.
        zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    return trainer


@contextlib.contextmanager
def set_in_environment(variables):
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def train(
    output,
    task,
    batch=8,
    accumulation=1,
    *,
    model=MappingProxyType({}),
    rows=80,
    dual_rows=0,
    labels_change_at=None,
    lora=False,
    resume_from=None,
    evaluate_first=False,
    record_noise=False,
    poison=None,
    environment=MappingProxyType({}),
    **settings,
):
    """Results, and weights by name; `output` gets the checkpoints.

    Args:
        task: a case of `model_and_data`.
        batch, accumulation: rows of a micro-batch on each process, and micro-batches of a step.
        model: settings of the model's config.
        dual_rows: how many of the rows the multipliers move on, in place of training.
        labels_change_at: the row from which on the labels are others.
        resume_from: a checkpoint to go on from.
        poison: the kind and the step of a `Poison`.
        environment: variables for this training.
        settings: of the trainer's arguments.
    """
    model, data = model_and_data(task, rows, model)
    if labels_change_at is not None:
        data = with_another_label_from(labels_change_at, data)
    noise = recorded_noise(model) if record_noise else []
    settings["per_device_train_batch_size"] = batch
    settings["gradient_accumulation_steps"] = accumulation

    with set_in_environment(environment):
        trainer = make_trainer(task, model, output, settings, data, dual_rows, lora)
        if poison:
            trainer.add_callback(Poison(*poison, trainer))

        if evaluate_first:
            trainer.evaluate()
        other_arguments = SimpleNamespace()
        train_and_report(trainer, resume_from, lambda: "", OutputArguments(), other_arguments)

        metrics = {}
        if not poison:
            metrics.update(trainer.evaluate())
        if getattr(trainer, "padding_free", False):
            metrics.update(trainer.predict(trainer.eval_dataset).metrics)
        weights = weights_of(trainer)

    sigma = getattr(model.config, "noise_sigma", None)
    return result_of(trainer, str(output), metrics, noise, sigma), weights


def weights_of(trainer):
    """Weights by name, on the first process; none on the others, which may have to give their part."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if weights is None:
        return {}
    return {name: weight.clone() for name, weight in weights.items()}


def result_of(trainer, folder, metrics, noise, sigma):
    """What a training led to, in JSON values; the same on all processes."""
    gather = partial(trainer.accelerator.gather_for_metrics, use_gather_object=True)

    multipliers = torch.zeros(3)
    dual_steps = 0
    if trainer.multipliers is not None:
        multipliers = trainer.multipliers.values
        dual_steps = trainer.multipliers.steps
    problem = {"alpha": 0.0}
    if trainer.problem is not None:
        problem = trainer.problem.state_dict()

    def logged(name):
        return [log[name] for log in trainer.state.log_history if name in log]

    layer_losses = sorted(name for name in metrics if name.startswith("eval_layer_loss"))
    left_whole = [getattr(weight, "ds_persist", False) for weight in trainer.model.parameters()]

    return {
        "folder": folder,
        "processes": trainer.args.world_size,
        "type": trainer.accelerator.distributed_type.value,
        "left_whole": sum(left_whole),
        "steps": gather([trainer.state.global_step]),
        "dual_steps": dual_steps,
        "losses": logged("loss"),
        "rises": logged("last_layer_rise"),
        "path": logged("multiplier_1"),
        "multipliers": gather([multipliers.tolist()]),
        "noise": gather([[draw.tolist() for draw in noise]]),
        "eval": [metrics[name] for name in layer_losses],
        "metrics": metrics,
        "problem": problem,
        "sigma": sigma,
    }


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
