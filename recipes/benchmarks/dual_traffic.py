"""What the dual side sends between processes in an optimizer step, against what training itself sends.

    python recipes/benchmarks/dual_traffic.py

Real processes train small models (DDP over gloo on a CPU) with the collectives of `torch.distributed` and the gradient
buckets of DDP counted; the difference between the descent objective and plain training is the dual side. Its bytes
depend on the number of layers L alone: not on vocabulary V, width H, or the number of processes, which the runs show,
at the depths of Llama 8B and 70B among others. What training sends there is counted from their parameters on the meta
device. Bytes are those handed to a collective; a ring carries each 2 (N - 1) / N times for N processes, on both sides.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list  # noqa: F401  (binds the collectives before they are counted)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_descent import DescentConfig, DescentTrainer


CONFIG = Path(__file__).parent.parent / "accelerate_configs" / "cpu_ddp.yaml"
STEPS = 4
# Layers, vocabulary, width: one thing changed at a time, then the depths of Llama 8B and 70B.
SHAPES = [(4, 64, 16), (8, 64, 16), (4, 9000, 16), (4, 64, 64), (32, 64, 16), (80, 64, 16)]
LLAMAS = {
    "Llama 8B": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    },
    "Llama 70B": {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    },
}  # fmt: skip
LORA = {"r": 6, "target_modules": ["q_proj", "v_proj"]}  # the paper's rank, on peft's default layers of Llama


class Traffic(TrainerCallback):
    """Calls and bytes of each collective since the first step, which is not counted: it finds the readout."""

    def __init__(self):
        self.calls, self.bytes, self.counting = Counter(), Counter(), False
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
            setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name, collective):
        def call(*args, **kwargs):
            if self.counting:
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                self.count(name, tensors[0])
            return collective(*args, **kwargs)

        return call

    def count(self, name, tensor):
        self.calls[name] += 1
        self.bytes[name] += tensor.numel() * tensor.element_size()

    def on_train_begin(self, args, state, control, **kwargs):
        def bucket(group, bucket):
            if self.counting:
                self.count("gradients", bucket.buffer())
            return allreduce_hook(group, bucket)

        self.trainer.model_wrapped.register_comm_hook(None, bucket)

    def on_step_begin(self, args, state, control, **kwargs):
        self.counting = state.global_step > 0

    def on_step_end(self, args, state, control, **kwargs):
        self.counting = False


def count(folder, objective, layers, vocabulary, width):
    """{collective: (calls, bytes)} of one optimizer step of two micro-batches."""
    traffic = Traffic.instance
    traffic.calls.clear(), traffic.bytes.clear()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip
    ids = torch.arange(8)
    args = DescentConfig(
        folder, objective=objective, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=STEPS, initial_loss_bound=20.0,
        descent_alpha=0.1, dual_warmup_steps=0, logging_strategy="no", log_level="error",
    )  # fmt: skip
    trainer = DescentTrainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 64, callbacks=[traffic])
    traffic.trainer = trainer
    trainer.train()
    return {name: (traffic.calls[name] / (STEPS - 1), traffic.bytes[name] / (STEPS - 1)) for name in traffic.calls}


def child(output):
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    Traffic.instance = Traffic()
    found = [
        [count(os.path.dirname(output), objective, *shape) for objective in ("erm", "descent")] for shape in SHAPES
    ]
    if int(os.environ["RANK"]) == 0:
        Path(output).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def measure(processes):
    """For each of `SHAPES`, the counts of plain and of constrained training."""
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "counts.json")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
        command += ["--num_processes", str(processes)]
        subprocess.run([*command, __file__, "--child", output], check=True, capture_output=True, text=True)
        return json.loads(Path(output).read_text())


def dual_side(plain, constrained):
    """Calls and bytes of a step that plain training lacks."""
    names = plain.keys() | constrained.keys()
    calls, sizes = (
        {name: constrained.get(name, (0, 0))[i] - plain.get(name, (0, 0))[i] for name in names} for i in (0, 1)
    )
    return sum(calls.values()), sum(sizes.values())


def trained_bytes(name, adapters):
    """Bytes of the gradients of a step, float32, as DDP reduces them."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, **LLAMAS[name]))
        if adapters:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(**LORA))
    return sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def report(counts):
    """The table of `measure`'s counts by number of processes; AssertionError for a dual side of 0.1 % or more."""
    lines = ["processes   L     V   H dual calls dual bytes gradient bytes"]
    by_depth = {}
    for processes, found in counts.items():
        for (layers, vocabulary, width), (plain, constrained) in zip(SHAPES, found):
            calls, size = dual_side(plain, constrained)
            assert by_depth.setdefault(layers, (calls, size)) == (calls, size), "depends on more than the layers"
            gradients = constrained["gradients"][1]
            lines.append(
                f"{processes:9} {layers:3} {vocabulary:5} {width:3} {calls:10.0f} {size:10.0f} {gradients:14.0f}"
            )
    for name in LLAMAS:
        calls, size = by_depth[LLAMAS[name]["num_hidden_layers"]]
        for adapters in (False, True):
            whole = trained_bytes(name, adapters)
            share = size / (size + whole)
            assert share < 1e-3
            kind = "adapters" if adapters else "full"
            lines.append(
                f"{name}, {kind}: {calls:.0f} collectives and {size:.0f} bytes of {whole:.3g} bytes of gradients in a "
                f"step: {share:.2g}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options.child)
    print(report({processes: measure(processes) for processes in options.processes}))
