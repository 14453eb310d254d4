"""The bytes that the first of several processes holds: shards in an optimizer step under FSDP2 or, of models that are
named, the peaks of a step under the launcher."""

import json
import os
import sys
from pathlib import Path
from unittest import mock
from weakref import WeakValueDictionary


sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from accelerate_on_cpu import keep_sharding_on_cpu
from peft import LoraConfig, get_peft_model
from tiny.data import language_data
from tiny.models import llama
from tiny.training import config
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from hf_descent import DescentTrainer


keep_sharding_on_cpu()
ODD = 41  # rows of the table and the head, which two processes cannot share evenly
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "bf16": True,
    "optim": "adamw_torch_fused",
}
# DeepSpeed's constants are for billions of weights. Here they are as large a part of the weights of `deep`.
BUFFERS = {
    "reduce_bucket_size": 20_000,
    "allgather_bucket_size": 20_000,
    "stage3_prefetch_bucket_size": 2_000,
}
BUFFERS |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 40_000)
BUFFERS["stage3_param_persistence_threshold"] = 0


# What kinds are called, and the settings that they add.
ADDED = {
    "checkpointed": {"activation_checkpointing": True},
    "accumulated": {"gradient_accumulation_steps": 2},
}


def settings(kind):
    return dict(
        SETTINGS,
        **{name: value for word in kind.split() for name, value in ADDED.get(word, {}).items()},
    )


def deep(kind):
    """A model of 8 layers with 41,088 weights each, beside which the activations of few short rows are small."""
    tied = {"tie_word_embeddings": "tied" in kind}
    model = llama(num_layers=8, hidden_size=64, intermediate_size=128, vocab_size=ODD, **tied)
    model = model if "float32" in kind else model.bfloat16()
    if "adapters" in kind:
        return get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model


def local(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors if isinstance(tensor, DTensor))


class Sizes(TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.sizes = {
            "weights": local(parameters),
            "gradients": local(parameter.grad for parameter in parameters),
            "optimizer": local(
                value for values in optimizer.state.values() for value in values.values()
            ),
        }


class Alive(TorchDispatchMode):
    """The most bytes held at once, of what is given and of what is made inside. FSDP2 frees the memory of tensors that
    live on, so sizes are those of the moment."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = WeakValueDictionary()
        self.peak = 0
        self.hold(tensors)

    def hold(self, tensors):
        for tensor in tensors:
            tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.hold(tree_leaves(out))
        return out


class Peaks(TrainerCallback):
    """Those of the last step, of its passes and of its update."""

    def __init__(self, alive):
        self.alive = alive

    def on_step_begin(self, args, state, control, **kwargs):
        self.alive.peak = 0
        self.sizes = {}

    def end_passes(self):
        if not self.sizes:
            self.sizes["passes"] = self.alive.peak
            self.alive.peak = 0

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.end_passes()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.sizes["update"] = self.alive.peak


def shards(folder):
    sizes = Sizes()
    args = config(folder, max_steps=1, optim="adamw_torch_fused")
    DescentTrainer(
        llama(vocab_size=ODD), args, train_dataset=language_data(16), callbacks=[sizes]
    ).train()
    return sizes.sizes


def peaks(folder, kind):
    model = deep(kind)
    alive = Alive([*model.parameters(), *model.buffers()])
    found = Peaks(alive)
    trainer = DescentTrainer(
        model, config(folder, **settings(kind)), train_dataset=language_data(16), callbacks=[found]
    )
    if (plugin := trainer.accelerator.state.deepspeed_plugin) is None:
        with alive:
            trainer.train()
        return found.sizes
    from deepspeed import DeepSpeedEngine

    step = DeepSpeedEngine.step  # at the end of accelerate's backward pass

    def end_passes_and_step(*args, **kwargs):
        found.end_passes()
        return step(*args, **kwargs)

    plugin.deepspeed_config["zero_optimization"] |= BUFFERS

    with mock.patch.object(DeepSpeedEngine, "step", end_passes_and_step), alive:
        trainer.train()

    return found.sizes


def main(folder, *kinds):
    found = {kind: peaks(folder, kind) for kind in kinds} or shards(folder)
    if os.environ["RANK"] == "0":
        (folder / "sizes.json").write_text(json.dumps(found))
    os._exit(0)  # as in `train_steps.py`


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
