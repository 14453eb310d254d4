"""Launched by test_ddp: a few steps of SGD, however many processes there are; rank 0 writes what they led to."""

import json
import os
import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import bert, classification_data, config, language_data, llama
from torch.utils.data import SequentialSampler
from transformers import ViTConfig, ViTForImageClassification

from hf_descent import DescentTrainer, layer_profile


class InOrder(DescentTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


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


def main(task: str, output: str, batch: int, accumulation: int, settings: dict) -> None:
    torch.set_num_threads(1)
    model, data = {
        "classification": lambda: (bert(), classification_data(80)),
        "language": lambda: (llama(), language_data(80)),
        "image": lambda: (vit(), images(80)),
    }[task]()
    args = config(
        output,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=accumulation,
        **{
            "max_steps": 10, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "descent_alpha": 0.4,
            "dual_optim": "sgd", "dual_learning_rate": 0.5, "negative_weights": "keep",
            **settings,
        },
    )  # fmt: skip
    trainer = InOrder(model, args, train_dataset=data, eval_dataset=data[:29])
    trainer.train()
    metrics = trainer.evaluate()
    curve = trainer.evaluate_robustness(gammas=[0.0, 1.0])
    shared = {"accelerator": trainer.accelerator, "batch_size": 8}
    profile = layer_profile(trainer.accelerator.unwrap_model(trainer.model), data[:29], **shared)
    path = [log["multiplier_1"] for log in trainer.state.log_history if "multiplier_1" in log]
    values = torch.zeros(3) if trainer.multipliers is None else trainer.multipliers.values
    gathered = trainer.accelerator.gather(values[None])  # [processes, layers]
    if trainer.is_world_process_zero():
        Path(output).mkdir(parents=True, exist_ok=True)
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        torch.save(weights, Path(output) / "weights.pt")
        result = {
            "processes": trainer.args.world_size,
            "losses": [log["loss"] for log in trainer.state.log_history if "grad_norm" in log],
            "path": path,
            "multipliers": gathered.reshape(trainer.args.world_size, -1).tolist(),
            "eval": [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]
            if "eval_layer_loss_1" in metrics
            else [],
            "curve": [*curve.losses[:, 0], *curve.mean, *curve.radius("mean")],
            "profile": [*profile.losses, *profile.sample_losses[-1], len(profile.sample_losses)],
            "problem": trainer.problem.state_dict() if trainer.problem else {"alpha": 0.0},
        }
        (Path(output) / "result.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    # Torch's threads can abort the interpreter's end ("terminate called without an active exception"); all is written.
    os._exit(0)


if __name__ == "__main__":
    task, output, batch, accumulation, settings = sys.argv[1:]
    main(task, output, int(batch), int(accumulation), json.loads(settings))
