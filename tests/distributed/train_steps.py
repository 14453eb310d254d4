"""Launched by the tests here: a few steps of SGD, however many processes there are; rank 0 writes what they led to."""

import json
import os
import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent.parent))
from accelerate_on_cpu import keep_sharding_on_cpu
from tiny import InOrder, bert, classification_data, config, language_data, llama
from transformers import ViTConfig, ViTForImageClassification


keep_sharding_on_cpu()


def vit():
    """Honours `num_items_in_batch` and is read by replay, which neither of the others does."""
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=8,
            patch_size=4,
        )
    )  # fmt: skip


def images(count):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    return [{"pixel_values": image, "labels": int(image.mean() > 0)} for image in pixels]


def partly_labelled(count):
    """Language rows of which the second process, or every second micro-batch, gets some batches without a label.

    The first of them is the very first batch, on which the readout is looked for.
    """
    rows = language_data(count)
    for row in [*rows[4:8], *rows[12:16]]:
        row["labels"][:] = -100
    return rows


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def main(task: str, output: str, batch: int, accumulation: int, settings: dict) -> None:
    torch.set_num_threads(1)
    lora, resume = settings.pop("lora", False), settings.pop("resume_from", None)
    evaluate_first = settings.pop("evaluate_first", False)
    model_settings = {name: settings.pop(name) for name in ("tie_word_embeddings",) if name in settings}
    model, data = {
        "classification": lambda: (bert(), classification_data(80)),
        "language": lambda: (llama(**model_settings), partly_labelled(80)),
        "image": lambda: (vit(), images(80)),
    }[task]()
    args = config(
        output,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **{
            "max_steps": 20, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "descent_alpha": 0.4,
            "dual_optim": "sgd", "dual_learning_rate": 0.5, "negative_weights": "keep",
            **settings,
        },
    )  # fmt: skip
    trainer = InOrder(with_lora(model) if lora else model, args, train_dataset=data, eval_dataset=data[:31])
    before = trainer.evaluate() if evaluate_first else {}
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    path = [log["multiplier_1"] for log in trainer.state.log_history if "multiplier_1" in log]
    values = torch.zeros(3) if trainer.multipliers is None else trainer.multipliers.values
    gathered = trainer.accelerator.gather(values[None])  # [processes, layers]
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # on all processes, which may have to gather
    if trainer.is_world_process_zero():
        Path(output).mkdir(parents=True, exist_ok=True)
        torch.save({name: weight.clone() for name, weight in weights.items()}, Path(output) / "weights.pt")
        result = {
            "processes": trainer.args.world_size,
            "type": trainer.accelerator.distributed_type.value,
            "losses": [log["loss"] for log in trainer.state.log_history if "grad_norm" in log],
            "path": path,
            "multipliers": gathered.reshape(trainer.args.world_size, -1).tolist(),
            "eval": [value for name, value in sorted(metrics.items()) if name.startswith("eval_layer_loss")],
            "before": before.get("eval_loss"),
            "problem": trainer.problem.state_dict() if trainer.problem else {"alpha": 0.0},
        }
        (Path(output) / "result.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    # Torch's threads can abort the interpreter's end ("terminate called without an active exception"); all is written.
    os._exit(0)


if __name__ == "__main__":
    task, output, batch, accumulation, settings = sys.argv[1:]
    main(task, output, int(batch), int(accumulation), json.loads(settings))
