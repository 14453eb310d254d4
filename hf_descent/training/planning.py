"""What a training step will need, from the shapes of a model alone: peak memory by part, and operations.

The step is that of training, on torch's fake tensors, which have shapes and no values: the same model, layer losses,
backward pass and optimizer. Only what the probes find out by values (layers, norm and head, the shift of the labels)
is found on a narrow copy of the model with random weights, and carried over.
"""

import copy
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PretrainedConfig, Trainer, TrainingArguments

from ..compat import disable_checkpointing, enable_checkpointing
from ..constraints.state import DescentState
from ..losses import short_batch
from ..losses.layerwise import TiledLosses, find_layer_losses
from ..losses.task import TaskLoss
from ..noise.embedding_noise import EmbeddingNoise
from ..readout import head, tiles
from ..readout.replay import output_loss, probing
from ..readout.stack import LayerStack, errors_explained, inner_model, tensors
from .objective import DescentObjective


PARTS = ("weights", "gradients", "optimizer", "hidden states", "readout")
REFUSAL = "cannot be planned (measure a few steps with `skip_memory_metrics: false`)"
HEAD_WIDTH = 8  # of an attention head in the narrow copy
_aten = torch.ops.aten
# How many tensors the most frequent operations take, for whose results fake tensors need three times as long as torch.
QUICK = {_aten.mm: 2} | dict.fromkeys(
    (_aten._unsafe_view, _aten.detach, _aten.expand, _aten.t, _aten.view), 1
)


def _attention(formula, count, *args, **kwargs):
    """`formula` of the first `count` shapes; torch before 2.13 has none where heads share keys and values."""
    heads = max(each.shape[1] for each in args[:count])
    return formula(*((each.shape[0], heads, *each.shape[2:]) for each in args[:count]))


# torch counts neither products that are added in place or of experts, nor attention on a CPU.
OPERATIONS = flop_registry | {
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten._grouped_mm: lambda left, right, *_, **__: (
        2 * left.numel() * right.shape[-1]
    ),  # each row by one expert
    _aten._scaled_dot_product_flash_attention_for_cpu: partial(_attention, sdpa_flop_count, 3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: partial(
        _attention, sdpa_backward_flop_count, 4
    ),
}


@dataclass
class StepCost:
    """What one training step takes in one process."""

    moments: list[
        Counter
    ]  # bytes of each of `PARTS` at the peak of the passes, and at that of the optimizer's step
    operations: Counter  # of floating-point numbers in matrix products, of "hidden states" and of the "readout"

    @property
    def memory(self) -> Counter:
        return max(self.moments, key=Counter.total)


class Meter(TorchDispatchMode):
    """Counts memory and operations of what runs inside, for the part that `part` names: the bytes of each part that
    are `alive` now, those of the moment when they were most in all, its `peak`, and the `operations` of each."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.part, self.alive, self.peak, self.operations = (
            "weights",
            Counter(),
            Counter(),
            Counter(),
        )
        self._held = {}  # id of a storage -> its part, the bytes counted, and a reference that tells when it is freed
        self._gathered = {}  # id of a storage -> a tensor that lives on when FSDP2 frees its memory
        for tensor in (*model.parameters(), *model.buffers()):
            self.hold(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        given = args[: QUICK.get(func._overloadpacket, 0)]
        if given and all(
            type(each) is fake_tensor.FakeTensor and each.constant is None for each in given
        ):
            with fake_tensor.in_kernel_invocation_manager(given[0].fake_mode):
                out = func(*args, **kwargs)
            out = fake_tensor.FakeTensor(given[0].fake_mode, out, given[0].fake_device)
        elif func is _aten._grouped_mm.default:  # whose fake results torch has in bf16 alone
            out = func(*(each.bfloat16() for each in args[:2]), *args[2:], **kwargs).to(
                args[0].dtype
            )
        else:
            out = func(*args, **kwargs)
        if count := OPERATIONS.get(func._overloadpacket):
            self.operations[self.part] += count(*args, **kwargs, out_val=out)
        source = (
            self._held.get(id(args[0].untyped_storage()))
            if func is _aten._to_copy.default
            else None
        )
        for tensor in tensors(out):
            is_copy = (
                source is not None and source.part == "weights" and tensor.itemsize == 2
            )  # as of autocast
            self.hold(tensor, "weights" if is_copy else None)
        if func.namespace == "fsdp":  # its operations write into tensors that they are given
            for tensor in tensors((args, kwargs)):
                self.hold(
                    tensor, "gradients" if func is torch.ops.fsdp.chunk_cat.default else "weights"
                )
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            self._gathered |= {id(each.untyped_storage()): each for each in kwargs["out"]}
        if self.alive.total() > self.peak.total():
            for tensor in self._gathered.values():
                self.hold(tensor)  # of which some may be freed
            self.peak = max(self.alive.copy(), self.peak, key=Counter.total)
        return out

    def follow(self, stack: LayerStack, trained: list) -> list:
        """Set `part` in the next passes: what follows the last layer is the readout's. Returns the hooks' handles."""
        self.part, calls = "hidden states", []

        def leave(layer, args, output):
            calls.append(layer)
            if len(calls) == stack.num_layers:  # later ones are repeated for the backward pass
                self.part = "readout"
                stack.hidden_state(output).register_hook(
                    lambda grad: setattr(self, "part", "hidden states")
                )

        own = [layer.register_forward_hook(leave) for layer in stack.layers]
        return own + [
            w.register_post_accumulate_grad_hook(lambda w: self.hold(w.grad, "gradients"))
            for w in trained
        ]

    def hold(self, tensor, part=None):
        """Count the memory that a tensor has now; where `part` is given for that part, also if another had it."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = id(storage)
        if key not in self._held:
            freed = weakref.ref(storage, partial(self._free, key))
            self._held[key] = SimpleNamespace(part=self.part, size=0, freed=freed)
        held = self._held[key]
        self.alive[held.part] -= held.size
        held.part, held.size = part or held.part, storage.nbytes()
        self.alive[held.part] += held.size

    def _free(self, key, _):
        held = self._held.pop(key)
        self.alive[held.part] -= held.size


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
        is_stateful = getattr(self.model, "_is_stateful", False)
        if is_stateful and not hasattr(self.model.config.get_text_config(), "num_attention_heads"):
            raise ValueError(
                f"{type(self.model).__name__} {REFUSAL}: a GPU has other code for what has no attention."
            )
        with (
            errors_explained(
                f"The plan looks for the layers in a narrow {type(self.model).__name__}, which failed:"
            ),
            mock.patch.object(
                short_batch, "PROBED_TOKENS", 8
            ),  # enough; memory is counted below, on all
        ):
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
        self.layers = copy.deepcopy(layers, counterparts)

    def probe(self) -> int:
        """Bytes that the search for the layers takes beside the weights; ValueError where the model goes by values."""
        try:
            with self._fake, Meter(self.model) as meter, probing(self.model):
                meter.part = "probe"
                self.layers.readout.read(
                    self._short, output_loss, [1]
                )  # one layer needs what another does
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
        ) as error:
            raise ValueError(
                f"{type(self.model).__name__} {REFUSAL}: it goes by values ({error})."
            ) from error
        return meter.peak["probe"]

    @contextmanager
    def sharded(self, processes: int):
        """A copy of this model as the first of `processes` has it under FSDP2: sharded by accelerate, as in training,
        for a process group that talks to nobody. ValueError where it cannot be, or a process group exists already."""
        if processes < 2 or dist.is_initialized():
            raise ValueError(
                "FSDP2 is planned for two processes or more, and where there is no process group yet."
            )
        memo = {id(each): each for each in (self._fake, self._short, *self.model.buffers())}
        memo |= {
            id(w): nn.Parameter(torch.empty_like(w), w.requires_grad)
            for w in self.model.parameters()
        }
        planned = copy.deepcopy(self, memo)
        units = {
            "transformer_cls_names_to_wrap": {
                type(each).__name__ for each in self.layers.readout.stack.layers
            }
        }
        policies = {"auto_wrap_policy": "transformer_based_wrap", "mixed_precision_policy": "bf16"}
        accelerator = mock.Mock(mixed_precision="bf16", is_main_process=False)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, **policies, **units
        )
        accelerator.parallelism_config.fsdp_dim_names = ("shard",)
        with (
            errors_explained("FSDP2 cannot be planned:"),
            mock.patch("sys.excepthook"),
        ):  # which torch replaces
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
            try:
                accelerator.torch_device_mesh = dist.init_device_mesh(
                    "cpu", (processes,), mesh_dim_names=("shard",)
                )
                fsdp2_prepare_model(accelerator, planned.model)
                yield planned
            finally:
                dist.destroy_process_group()

    def step(self, batch: Mapping[str, Any], args: TrainingArguments) -> StepCost:
        """What a step outside the warm-up costs on a GPU, with such micro-batches; `args` as of `DescentTrainer`."""
        layers = copy.deepcopy(self.layers, {id(module): module for module in self.model.modules()})
        # Without the curriculum of LayerSkip, which has all exits from half of a run on.
        own_args = copy.copy(args)
        own_args.dual_warmup_steps, own_args.layerskip_rotation = 0.0, args.layerskip_rotation or 1
        dual = DescentState(own_args, layers.num_layers, 1, 0, chance=1.0)
        if isinstance(layers, TiledLosses):
            layers.token_fraction = args.readout_token_fraction or layers.token_fraction
        disable_checkpointing(self.model)
        self.model.disable_input_require_grads()  # which the former leaves on
        if args.activation_checkpointing:
            enable_checkpointing(self.model, args.activation_checkpointing_kwargs)
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, self.model)
        if "foreach" in inspect.signature(optimizer_class).parameters and not options.get("fused"):
            options["foreach"] = True  # torch's choice on a GPU
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        forward = self.model.forward
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if (
            args.bf16 or args.fp16
        ) and not units:  # as accelerate wraps it; the backward pass is outside
            autocast = torch.autocast("cpu", torch.float16 if args.fp16 else torch.bfloat16)
            forward = convert_outputs_to_fp32(autocast(forward))
        find_labels = fake_tensor.unset_fake_temporarily()(
            head.labelled_tokens
        )  # which are no question of shapes
        noise = (
            EmbeddingNoise(self.model, args.noise_gamma, args.seed, 1.0)
            if args.gamma_train
            else nullcontext()
        )
        with (
            mock.patch.object(head, "labelled_tokens", find_labels),
            mock.patch.multiple(
                tiles, TILE_ELEMENTS={}, SLICE_ELEMENTS={}
            ),  # the defaults, which are a GPU's
            mock.patch.object(self.model, "forward", forward),
            self._fake,
            Meter(self.model) as meter,
        ):
            # From the second micro-batch on, the gradients lie beside what the passes hold; under FSDP2 whole ones.
            if args.gradient_accumulation_steps > 1:
                for unit in units:
                    unit.unshard()
                for weight in self.model.parameters():
                    if weight.requires_grad:
                        weight.grad = torch.empty_like(weight)
                        meter.hold(weight.grad, "gradients")
                for unit in units:
                    unit.reshard()
                meter.peak = Counter()
            hooks = meter.follow(layers.readout.stack, trained)
            with noise:
                if args.objective == "erm":
                    objective = output_loss(self.model(**batch))
                else:
                    objective = DescentObjective.of(layers, dual)(self.model, batch)
            objective.backward()
            for hook in hooks:
                hook.remove()
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(trained, args.max_grad_norm, foreach=True)
            passes, meter.peak, meter.part = meter.peak, Counter(), "optimizer"
            optimizer = optimizer_class(trained, **options)
            optimizer.step()
            optimizer.zero_grad()
            passes["optimizer"] += meter.alive[
                "optimizer"
            ]  # its state is there from the second step on
        operations = {
            part: count * args.gradient_accumulation_steps
            for part, count in meter.operations.items()
        }
        return StepCost([passes, meter.peak], Counter(operations))

    def launched(self, cost: StepCost, processes: int) -> dict[str, StepCost]:
        """The cost in each of several processes under DeepSpeed, which needs real ones, by launcher. It computes on a
        copy of the weights in bf16, and shares by rows what is float32: trained weights, gradients and the optimizer's
        state; ZeRO-3 shares the copy, too. Hidden states and readout stay as in `cost`, in the recipe's precision."""

        def size(weights, width, parts=processes):
            return sum(-(-len(each) // parts) * each.shape[1:].numel() * width for each in weights)

        weights = list(self.model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        masters, copies = size(trained, 4), size(weights, 2, parts=1)
        layers = [
            size(layer.parameters(), 2, parts=1) for layer in self.layers.readout.stack.layers
        ]
        # One layer is fetched while another computes; what belongs to none stays.
        held = {
            "zero2": (copies, 0),
            "zero3": (size(weights, 2), copies - sum(layers) + 2 * max(layers)),
        }
        found, share = {}, masters / sum(weight.nbytes for weight in trained)
        # They are bf16. The update flattens them and makes them float32, ZeRO-3 a billion of them at a time.
        passes, flat = share * cost.moments[0]["gradients"], masters / 2 + 1.5 * min(masters, 4e9)
        gradients = {"zero2": (passes / 2, 2 * masters), "zero3": (masters / 2, flat)}
        for name, (kept, extra) in held.items():
            found[name] = StepCost([], cost.operations)
            for moment, others, whole in zip(cost.moments, (kept + extra, kept), gradients[name]):
                shared = {
                    "gradients": round(whole),
                    "optimizer": round(share * moment["optimizer"]),
                }
                found[name].moments.append(Counter(moment | shared | {"weights": masters + others}))
        return found


def narrow(config: PretrainedConfig) -> PretrainedConfig:
    """The same architecture, depth and vocabulary, with `HEAD_WIDTH` numbers to each of the heads that share a key."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads = text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or 1)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": HEAD_WIDTH}
    # Other sizes, such as a pooler's, are equal to the width of the hidden states.
    alike = [
        name
        for name, value in vars(text).items()
        if type(value) is int and value == text.hidden_size
    ]
    sizes |= dict.fromkeys(
        ["hidden_size", "intermediate_size", "moe_intermediate_size", *alike], HEAD_WIDTH * heads
    )
    for name, size in sizes.items():
        with suppress(AttributeError, TypeError):  # what a config has not, leaves out, or computes
            setattr(text, name, min(size, getattr(text, name)))
    return small
