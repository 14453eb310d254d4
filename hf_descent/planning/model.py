"""A model without weights, and what the steps of its training cost."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    convert_outputs_to_fp32,
    fsdp2_prepare_model,
)
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig, Trainer, TrainingArguments

from ..compat import disable_checkpointing, enable_checkpointing
from ..constraints.state import DualState
from ..losses import short_batch
from ..losses.layerwise import LayerLosses, TiledLosses, find_layer_losses
from ..losses.task import TaskLoss
from ..noise.embedding_noise import EmbeddingNoise
from ..readout import head, tiles
from ..readout.replay import output_loss, probing
from ..readout.stack import errors_explained, inner_model
from ..training.objective import LayerObjective
from ..training.records import StepTotals
from .meter import Meter


REFUSAL = "cannot be planned (measure a few steps with `skip_memory_metrics: false`)"
HEAD_WIDTH = 8  # of an attention head in the narrow copy
FLATTENED = 4e9  # bytes of weights that ZeRO-3 makes float32 at a time


@dataclass
class StepCost:
    """What one training step takes in one process.

    Attributes:
        moments (`list` of `Counter`): bytes of each of `PARTS` at the peak of the passes, and at that of the
            optimizer's step.
        operations (`Counter`): operations of floating-point numbers in matrix products, of "hidden states" and of the
            "readout".
    """

    moments: list[Counter]
    operations: Counter

    @property
    def memory(self) -> Counter:
        return max(self.moments, key=Counter.total)


class PlannedModel:
    """A model without weights, and the steps that it would take.

    Args:
        build: `build(shape)` makes the model of the config that `shape(config)` returns.
        batch: a micro-batch with labels as the trainer gives it to the model.
        token_statistics: whether the trainer logs statistics of the last layer's tokens, as `SFTDescentTrainer` does.

    ValueError where the layers cannot be read, or not be found on a narrow copy of the model.
    """

    def __init__(self, build: Callable, batch: Mapping[str, Any], token_statistics: bool = False):
        with errors_explained("The model cannot be built:"), torch.device("meta"):
            self.model = build(copy.copy).train()
        name = type(self.model).__name__
        is_stateful = getattr(self.model, "_is_stateful", False)
        if is_stateful and not hasattr(self.model.config.get_text_config(), "num_attention_heads"):
            raise ValueError(f"{name} {REFUSAL}: a GPU has other code for what has no attention.")

        failed = f"The plan looks for the layers in a narrow {name}, which failed:"
        # A few tokens are enough for that; memory is counted below, on all.
        few_tokens = mock.patch.object(short_batch, "PROBED_TOKENS", 8)
        with errors_explained(failed), few_tokens:
            twin = build(narrow)
            task = TaskLoss.probe(twin, batch)
            layers = find_layer_losses(
                twin, batch, task, token_statistics=token_statistics, trains=True
            )

        self._short = task.short(batch)

        self._fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake:
            self.model.to_empty(device="cpu")
            inner_model(self.model).tie_weights()
        counterparts = {
            id(module): self.model.get_submodule(name) for name, module in twin.named_modules()
        }
        self.layers: LayerLosses = copy.deepcopy(layers, counterparts)

    def probe(self) -> int:
        """Bytes that the search for the layers takes beside the weights; ValueError where the model goes by values."""
        try:
            with self._fake, Meter(self.model) as meter, probing(self.model):
                meter.start("probe")
                # One layer needs what another does.
                self.layers.readout.layer_scores(self._short, output_loss, [1])
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
        ) as error:
            raise ValueError(
                f"{type(self.model).__name__} {REFUSAL}: it goes by values ({error})."
            ) from error

        return meter.peak["probe"]

    @contextmanager
    def sharded(self, processes: int) -> Iterator["PlannedModel"]:
        """A copy of this model as the first of `processes` has it under FSDP2: sharded by accelerate, as in training,
        for a process group that talks to nobody. ValueError where it cannot be, or a process group exists already."""
        if processes < 2 or dist.is_initialized():
            raise ValueError(
                "FSDP2 is planned for two processes or more, and where there is no process group yet."
            )

        planned = self._with_own_weights()
        layers = {type(layer).__name__ for layer in self.layers.readout.stack.layers}
        accelerator = _fsdp2_accelerator(layers)
        # torch replaces `sys.excepthook`.
        with errors_explained("FSDP2 cannot be planned:"), mock.patch("sys.excepthook"):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
            try:
                accelerator.torch_device_mesh = dist.init_device_mesh(
                    "cpu", (processes,), mesh_dim_names=("shard",)
                )
                fsdp2_prepare_model(accelerator, planned.model)
                yield planned
            finally:
                dist.destroy_process_group()

    def _with_own_weights(self) -> "PlannedModel":
        """A copy whose weights are its own, and all other tensors those of this model."""
        known = {id(shared): shared for shared in (self._fake, self._short, *self.model.buffers())}
        for weight in self.model.parameters():
            known[id(weight)] = nn.Parameter(torch.empty_like(weight), weight.requires_grad)
        return copy.deepcopy(self, known)

    def step(self, batch: Mapping[str, Any], args: TrainingArguments) -> StepCost:
        """What a step outside the warm-up costs on a GPU, with such micro-batches; `args` as of `DescentTrainer`."""
        layers = self._layers(args)
        dual = _dual_after_warmup(args, layers.num_layers)
        self._set_checkpointing(args)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        noise = nullcontext()
        if args.gamma_train:
            noise = EmbeddingNoise(self.model, args.noise_gamma, args.seed, 1.0)
        # FSDP2 casts by itself.
        forward = self.model.forward if units else _mixed_precision(self.model.forward, args)

        with (
            _code_of_a_gpu(),
            mock.patch.object(self.model, "forward", forward),
            self._fake,
            Meter(self.model) as meter,
        ):
            # From the second micro-batch on, the gradients lie beside what the passes hold.
            if args.gradient_accumulation_steps > 1:
                _hold_gradients(self.model, units, meter)
                meter.start("weights")

            hooks = meter.follow(layers.readout.stack, trained)
            with noise:
                if args.objective_class.is_plain:
                    objective = output_loss(self.model(**batch))
                else:
                    objective = _objective_of(LayerObjective(layers, dual), self.model, batch)
            objective.backward()
            for hook in hooks:
                hook.remove()
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(trained, args.max_grad_norm, foreach=True)

            passes = meter.start("optimizer")
            optimizer = _optimizer(self.model, trained, args)
            optimizer.step()
            optimizer.zero_grad()
            passes["optimizer"] += meter.alive["optimizer"]  # there from the second step on

        operations = Counter()
        for part, count in meter.operations.items():
            operations[part] = count * args.gradient_accumulation_steps
        return StepCost([passes, meter.peak], operations)

    def _layers(self, args: TrainingArguments) -> LayerLosses:
        """The layer losses of one step, on this very model."""
        same_modules = {id(module): module for module in self.model.modules()}
        layers = copy.deepcopy(self.layers, same_modules)
        if isinstance(layers, TiledLosses) and args.readout_token_fraction:
            layers.token_fraction = args.readout_token_fraction
        return layers

    def _set_checkpointing(self, args: TrainingArguments) -> None:
        disable_checkpointing(self.model)
        self.model.disable_input_require_grads()  # which the former leaves on
        if args.activation_checkpointing:
            enable_checkpointing(self.model, args.activation_checkpointing_kwargs)

    def launched(self, cost: StepCost, processes: int) -> dict[str, StepCost]:
        """The cost in each of several processes under DeepSpeed, which needs real ones, by launcher. It computes on a
        copy of the weights in bf16, and shares by rows what is float32: trained weights, gradients and the optimizer's
        state; ZeRO-3 shares the copy, too. Hidden states and readout stay as in `cost`, in the recipe's precision."""
        weights = list(self.model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        masters = _bytes(trained, 4, processes)
        copies = _bytes(weights, 2)
        shards = _bytes(weights, 2, processes)
        layers = [_bytes(layer.parameters(), 2) for layer in self.layers.readout.stack.layers]
        # One layer is fetched while another computes; what belongs to none stays.
        gathered = copies - sum(layers) + 2 * max(layers)
        share = masters / sum(weight.nbytes for weight in trained)
        gradients = share * cost.moments[0]["gradients"]

        # At the peak of the passes, where gradients are bf16, and at that of the update, which flattens them and makes
        # them float32, ZeRO-3 a part of them at a time.
        zero2 = [
            {"weights": masters + copies, "gradients": round(gradients / 2)},
            {"weights": masters + copies, "gradients": round(2 * masters)},
        ]
        flattened = masters / 2 + 1.5 * min(masters, FLATTENED)
        zero3 = [
            {"weights": masters + shards + gathered, "gradients": round(masters / 2)},
            {"weights": masters + shards, "gradients": round(flattened)},
        ]

        costs = {}
        for name, moments in (("zero2", zero2), ("zero3", zero3)):
            shared = [
                Counter({**moment, **sizes, "optimizer": round(share * moment["optimizer"])})
                for moment, sizes in zip(cost.moments, moments)
            ]
            costs[name] = StepCost(shared, cost.operations)

        return costs


def narrow(config: PretrainedConfig) -> PretrainedConfig:
    """The same architecture, depth and vocabulary, with `HEAD_WIDTH` numbers to each of the heads that share a key."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    key_heads = getattr(text, "num_key_value_heads", None)
    heads = text.num_attention_heads // (1 if key_heads is None else key_heads)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": HEAD_WIDTH}
    # Other sizes, such as a pooler's, are equal to the width of the hidden states.
    alike = [
        name
        for name, value in vars(text).items()
        if type(value) is int and value == text.hidden_size
    ]

    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", *alike):
        sizes[name] = HEAD_WIDTH * heads
    for name, size in sizes.items():
        with suppress(AttributeError, TypeError):  # what a config has not, leaves out, or computes
            setattr(text, name, min(size, getattr(text, name)))

    return small


def _objective_of(
    objective: LayerObjective, model: nn.Module, batch: Mapping[str, Any]
) -> torch.Tensor:
    """What a step minimises. In a function of its own, so that the backward pass finds no other loss alive."""
    return objective.layer_losses(model, batch, StepTotals()).objective


def _dual_after_warmup(args: TrainingArguments, num_layers: int) -> DualState:
    """The dual side of a step outside the warm-up; without the curriculum of LayerSkip, which has all exits from half
    of a run on."""
    own_args = copy.copy(args)
    own_args.dual_warmup_steps = 0.0
    own_args.layerskip_rotation = args.layerskip_rotation or 1
    return DualState(own_args, num_layers, 1, 0, chance=1.0)


def _mixed_precision(forward: Callable, args: TrainingArguments) -> Callable:
    """`forward` as accelerate wraps it; the backward pass is outside."""
    if not (args.bf16 or args.fp16):
        return forward
    autocast = torch.autocast("cpu", torch.float16 if args.fp16 else torch.bfloat16)
    return convert_outputs_to_fp32(autocast(forward))


@contextmanager
def _code_of_a_gpu() -> Iterator[None]:
    """Inside, tiles have a GPU's sizes, which are the defaults, and labelled tokens are found by their values."""
    find_labels = fake_tensor.unset_fake_temporarily()(head.labelled_tokens)
    sizes = mock.patch.multiple(tiles, TILE_ELEMENTS={}, SLICE_ELEMENTS={})
    with mock.patch.object(head, "labelled_tokens", find_labels), sizes:
        yield


def _hold_gradients(model: nn.Module, units: Sequence[FSDPModule], meter: Meter) -> None:
    """Gradients as a micro-batch before leaves them; under FSDP2 they are whole."""
    for unit in units:
        unit.unshard()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.empty_like(weight)
            meter.hold(weight.grad, "gradients")
    for unit in units:
        unit.reshard()


def _optimizer(
    model: nn.Module, trained: Sequence[nn.Parameter], args: TrainingArguments
) -> torch.optim.Optimizer:
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if "foreach" in inspect.signature(optimizer_class).parameters and not options.get("fused"):
        options["foreach"] = True  # torch's choice on a GPU
    return optimizer_class(trained, **options)


def _fsdp2_accelerator(layers: set[str]) -> mock.Mock:
    """What accelerate's sharding asks an `Accelerator` for, where each of the classes `layers` is a unit."""
    accelerator = mock.Mock(mixed_precision="bf16", is_main_process=False)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy="bf16",
        transformer_cls_names_to_wrap=layers,
    )
    accelerator.parallelism_config.fsdp_dim_names = ("shard",)
    return accelerator


def _bytes(weights, width: int, processes: int = 1) -> int:
    """Bytes of `weights` at `width` bytes a number, in the first of `processes` that share them by rows."""
    return sum(
        -(-len(weight) // processes) * weight.shape[1:].numel() * width for weight in weights
    )
