"""A plan against what real steps hold and compute."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from naive_head import LiveStorage
from tiny.training import config
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    BertForSequenceClassification,
    DebertaV2ForSequenceClassification,
    LlamaForCausalLM,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
)

from hf_descent import DescentTrainer
from hf_descent.losses.layerwise import ReplayedLosses, TiledLosses
from hf_descent.planning.meter import OPERATIONS
from hf_descent.planning.model import PlannedModel, narrow


ROWS, LENGTH, VOCAB, STEPS, OPTIMIZER = 4, 48, 700, 2, "adamw_torch_fused"
CLASSES = {
    "bert": BertForSequenceClassification,
    "llama": LlamaForCausalLM,
    "t5": T5ForConditionalGeneration,
}
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
SIZES = {
    "bert": WIDTHS,
    "llama": WIDTHS | {"num_key_value_heads": 2},
    "mixtral": WIDTHS | {"num_key_value_heads": 2, "num_local_experts": 4},
    "t5": {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "decoder_start_token_id": 0},
}


def model_config(kind):
    # Whose attention is plain matrix products, which torch counts on any device.
    sizes = SIZES[kind] | {
        "vocab_size": VOCAB,
        "num_hidden_layers": 3,
        "attn_implementation": "eager",
    }
    return AutoConfig.for_model(kind, **sizes)


def batch(kind, rows=ROWS):
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.arange(rows) % 2 if kind == "bert" else ids,
    }


def in_place(total, left, right, *_, **__):
    """The operations of `total += left @ right`, which torch does not count."""
    return 2 * left[0] * left[1] * right[1]


class Counted(DescentTrainer):
    """Counts the operations of its steps."""

    operations = 0

    def training_step(self, *args, **kwargs):
        with FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.addmm_: in_place}
        ) as counter:
            # Its hooks on modules forbid `autograd.grad` inside, and keep tensors alive.
            counter.mod_tracker.__exit__()
            counter.mod_tracker = SimpleNamespace(parents={"Global"}, __exit__=lambda: None)
            loss = super().training_step(*args, **kwargs)
        self.operations += counter.get_total_flops()
        return loss


def measured(kind, args, model=None):
    """Bytes at the peak of a real run, its weights included, and the operations of a step."""
    torch.manual_seed(0)
    model, inputs = model or CLASSES[kind](model_config(kind)), batch(kind)
    rows = [{name: values[row] for name, values in inputs.items()} for row in range(ROWS)]
    rows *= STEPS * args.gradient_accumulation_steps
    trainer = Counted(model, args, train_dataset=rows)
    weights = {tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}
    with LiveStorage() as live:
        trainer.train()
    return live.peak + sum(storage.nbytes() for storage in weights), trainer.operations / STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("bert", {}),
        ("bert", {"activation_checkpointing": True}),
        (
            "bert",
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": 2},
            },
        ),
        ("t5", {}),
        ("llama", {}),
        ("llama", {"activation_checkpointing": True, "readout_token_fraction": 0.25}),
        ("llama", {"objective": "erm"}),
        ("bert", {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}),
        ("llama", {"gradient_accumulation_steps": 4}),
        ("bert", {"noise_gamma": 0.5, "noise_sigma": 1.0}),
        ("llama", {"noise_gamma": [0.0, 0.5], "noise_sigma": 1.0, "max_grad_norm": 0.0}),
        ("bert", {"bf16": True, "per_device_train_batch_size": 1}),
        ("llama", {"bf16": True}),
        (
            "llama",
            {"bf16": True, "per_device_train_batch_size": 1, "activation_checkpointing": True},
        ),
    ],
)
def test_memory_is_within_a_tenth_of_a_real_run_and_operations_are_equal(kind, arguments, tmp_path):
    args = config(
        tmp_path,
        **{"per_device_train_batch_size": ROWS, "max_steps": STEPS, "optim": OPTIMIZER} | arguments,
    )
    rows = args.per_device_train_batch_size
    peak, operations = measured(kind, args)
    planned = PlannedModel(lambda shape: CLASSES[kind](shape(model_config(kind))), batch(kind))
    cost = planned.step(batch(kind, rows), args)
    assert isinstance(planned.layers, TiledLosses if kind in ("llama", "t5") else ReplayedLosses)
    assert cost.operations.total() == operations
    if kind == "llama":  # of each layer's tokens with the head: the scores and both gradients
        read = (
            rows * (LENGTH - 1),
            2 * round(arguments.get("readout_token_fraction", 1) * rows * (LENGTH - 1)),
        )
        products = (
            3
            * args.gradient_accumulation_steps
            * (rows * LENGTH if "objective" in arguments else sum(read))
        )
        assert cost.operations["readout"] == products * 2 * VOCAB * SIZES[kind]["hidden_size"]
    assert cost.memory.total() == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("experts_trained", [True, False])
def test_experts_are_planned_as_of_a_real_run(experts_trained, tmp_path):
    def build(config):
        model = MixtralForCausalLM(config)
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(experts_trained)
        return model

    experts = model_config("mixtral")
    args = config(tmp_path, per_device_train_batch_size=ROWS, max_steps=STEPS, optim=OPTIMIZER)
    planned = PlannedModel(lambda shape: build(shape(experts)), batch("llama"))
    planned.probe()
    cost = planned.step(batch("llama"), args)
    peak, _ = measured("llama", args, build(experts))
    experts._experts_implementation = "eager"  # one after the other, by products that torch counts
    _, operations = measured("llama", args, build(experts))
    assert cost.operations.total() == operations
    assert cost.memory.total() == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("objective", ["erm", "descent"])
def test_half_precision_copies_of_all_products_weights_are_weights(objective, tmp_path):
    planned = PlannedModel(
        lambda shape: CLASSES["llama"](shape(model_config("llama"))), batch("llama")
    )
    cost = planned.step(
        batch("llama"), config(tmp_path, bf16=True, objective=objective, optim=OPTIMIZER)
    )
    held = sum(4 * weight.numel() for weight in planned.model.parameters())
    held += sum(buffer.nbytes for buffer in planned.model.buffers())
    copies = sum(
        2 * each.weight.numel()
        for each in planned.model.modules()
        if isinstance(each, torch.nn.Linear)
    )
    assert cost.moments[0]["weights"] == held + copies


def test_layerskip_is_planned_with_all_its_exits(tmp_path):
    planned = PlannedModel(
        lambda shape: CLASSES["llama"](shape(model_config("llama"))), batch("llama")
    )
    objectives = (
        {"objective": "layerskip"},
        {"objective": "deep_supervision", "constrained_layers": [2, 3]},
    )
    given = {"optim": OPTIMIZER, "readout_token_fraction": 1.0}
    costs = [planned.step(batch("llama"), config(tmp_path, **given, **each)) for each in objectives]
    assert costs[0].operations.total() == costs[1].operations.total()


def planned_with_frozen_embeddings(dtype):
    def build(shape):
        model = CLASSES["bert"](shape(model_config("bert"))).to(dtype)
        model.bert.embeddings.requires_grad_(False)
        return model

    return PlannedModel(build, batch("bert"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launchers_hold_float32_shards_beside_bf16_weights(dtype, tmp_path):
    planned = planned_with_frozen_embeddings(dtype)
    step = planned.step(batch("bert"), config(tmp_path, optim=OPTIMIZER))
    costs = planned.launched(step, processes=1)
    sizes = {name: weight.numel() for name, weight in planned.model.named_parameters()}
    frozen = sum(size for name, size in sizes.items() if "embeddings" in name)
    trained, layer = (
        sum(sizes.values()) - frozen,
        sum(size for name, size in sizes.items() if "layer.0." in name),
    )
    fetched = 2 * (frozen + trained - layer)  # two of three layers at a time
    held = {"zero2": 2 * (frozen + trained), "zero3": 2 * (frozen + trained)}
    assert {name: cost.moments[1]["weights"] - 4 * trained for name, cost in costs.items()} == held
    gathered = {
        name: cost.moments[0]["weights"] - cost.moments[1]["weights"]
        for name, cost in costs.items()
    }
    assert gathered == {"zero2": 0, "zero3": fetched}
    # DeepSpeed has them in bf16, flattened, and in float32 at once; in the passes ZeRO-3 has a buffer of bf16.
    assert costs["zero3"].moments[0]["gradients"] == 2 * trained
    for cost in costs.values():
        assert cost.moments[1]["gradients"] == 8 * trained
        assert cost.moments[1]["optimizer"] == pytest.approx(8 * trained, rel=0.01)
        assert cost.moments[0]["readout"] == step.moments[0]["readout"]


def sharded_step(planned, args, processes=8, kind="llama"):
    with planned.sharded(processes) as first:
        return first.step(batch(kind), args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2_shards_all_weights_and_gathers_them_in_bf16(dtype, tmp_path):
    planned, args = planned_with_frozen_embeddings(dtype), config(tmp_path, optim=OPTIMIZER)
    passes, update = sharded_step(planned, args, 2, "bert").moments
    names, weights = zip(*planned.model.named_parameters())
    shards = [weight.shape[1:].numel() * -(-len(weight) // 2) for weight in weights]
    trained = sum(size for name, size in zip(names, shards) if "embeddings" not in name)
    buffers = sum(buffer.nbytes for buffer in planned.model.buffers())
    assert update["weights"] - buffers == 4 * trained + dtype.itemsize * (sum(shards) - trained)
    assert (update["gradients"], update["optimizer"]) == (
        4 * trained,
        pytest.approx(8 * trained, rel=0.01),
    )
    layer = sum(weight.numel() for name, weight in zip(names, weights) if "layer.0." in name)
    assert passes["weights"] > update["weights"] + 2 * layer


def test_fsdp2_does_the_operations_of_one_process_and_knows_tied_weights(tmp_path):
    def build(shape, tie_word_embeddings=False):
        llama = shape(model_config("llama"))
        llama.tie_word_embeddings = tie_word_embeddings
        return CLASSES["llama"](llama)

    args = config(tmp_path, optim=OPTIMIZER)
    untied, tied = (
        PlannedModel(lambda shape, t=t: build(shape, t), batch("llama")) for t in (False, True)
    )
    costs = [sharded_step(each, args) for each in (untied, tied)]
    assert (
        costs[0].operations == costs[1].operations == untied.step(batch("llama"), args).operations
    )
    table = 4 * VOCAB * WIDTHS["hidden_size"]
    spared = costs[0].moments[1]["weights"] - costs[1].moments[1]["weights"]
    assert spared == pytest.approx(table / 8, rel=0.01)


def test_fsdp2_keeps_whole_gradients_between_micro_batches(tmp_path):
    planned = PlannedModel(
        lambda shape: CLASSES["llama"](shape(model_config("llama"))), batch("llama")
    )
    one, several = (
        sharded_step(planned, config(tmp_path, optim=OPTIMIZER, gradient_accumulation_steps=count))
        for count in (1, 2)
    )
    whole = 2 * planned.model.num_parameters()
    assert one.memory["gradients"] < whole <= several.memory["gradients"] < 1.5 * whole
    assert several.operations.total() == 2 * one.operations.total()


def test_sharding_leaves_nothing_behind(tmp_path):
    planned = PlannedModel(
        lambda shape: CLASSES["llama"](shape(model_config("llama"))), batch("llama")
    )
    args = config(tmp_path, optim=OPTIMIZER)
    before = planned.step(batch("llama"), args)
    state = sys.excepthook, dict(os.environ), {type(module) for module in planned.model.modules()}
    cost = sharded_step(planned, args)
    with pytest.raises(ValueError, match=r"FSDP2 cannot be planned: RuntimeError\('out of luck'\)"):  # noqa: SIM117
        with planned.sharded(8):
            raise RuntimeError("out of luck")
    assert not dist.is_initialized()
    assert (
        sys.excepthook,
        dict(os.environ),
        {type(module) for module in planned.model.modules()},
    ) == state
    assert planned.step(batch("llama"), args) == before
    assert sharded_step(planned, args) == cost


def test_sharding_needs_processes_and_no_group_of_others(tmp_path):
    planned = PlannedModel(
        lambda shape: CLASSES["llama"](shape(model_config("llama"))), batch("llama")
    )
    with pytest.raises(ValueError, match="for two processes or more"), planned.sharded(1):
        pass
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        with (
            pytest.raises(ValueError, match="where there is no process group yet"),
            planned.sharded(8),
        ):
            pass
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_step_of_adapters_does_not_depend_on_the_one_before(tmp_path):
    peft = pytest.importorskip("peft")

    def build(shape):
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(CLASSES["llama"](shape(model_config("llama"))), lora)

    planned = PlannedModel(build, batch("llama"))
    plain, checkpointed = (
        config(tmp_path, activation_checkpointing=is_on) for is_on in (False, True)
    )
    first, _, last = (planned.step(batch("llama"), args) for args in (plain, checkpointed, plain))
    assert first == last


def test_the_narrow_copy_keeps_depth_and_vocabulary():
    config = AutoConfig.for_model("deberta-v2", num_hidden_layers=5, vocab_size=900)
    small = narrow(config)
    assert (small.num_hidden_layers, small.vocab_size, config.hidden_size) == (
        5,
        900,
        1536,
    )  # `config` as it was
    assert {small.hidden_size, small.intermediate_size, small.pooler_hidden_size} == {
        8 * config.num_attention_heads
    }
    t5 = narrow(AutoConfig.for_model("t5", d_model=512, num_heads=8, d_kv=64))
    assert (t5.d_model, t5.d_kv, t5.num_heads) == (64, 8, 8)
    assert (
        narrow(
            AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=2)
        ).hidden_size
        == 32
    )
    assert (
        narrow(AutoConfig.for_model("falcon", hidden_size=256, num_attention_heads=4)).head_dim == 8
    )  # computed
    many = narrow(AutoConfig.for_model("qwen3_moe", num_attention_heads=8, num_key_value_heads=2))
    assert (many.hidden_size, many.moe_intermediate_size, many.num_experts) == (32, 32, 128)


def test_a_model_that_goes_by_values_is_named():
    config = AutoConfig.for_model("deberta-v2", num_hidden_layers=2, vocab_size=VOCAB, **WIDTHS)
    remedy = "DebertaV2ForSequenceClassification cannot be planned .measure .* with `skip_memory_metrics: f"
    with pytest.raises(ValueError, match=remedy):
        PlannedModel(
            lambda shape: DebertaV2ForSequenceClassification(shape(config)), batch("bert")
        ).probe()


@pytest.mark.parametrize(("ending", "products"), [("", 2), ("_backward", 5)])
def test_heads_that_share_keys_are_counted_by_a_torch_that_does_not_know_them(ending, products):
    counted = OPERATIONS[
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{ending}")
    ]
    formula, count = counted.args

    def before_2_13(*shapes):
        assert len({heads for _, heads, *_ in shapes}) == 1
        return formula(*shapes)

    query, key = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
    tensors = [query] * (count - 2) + [key, key]
    assert (
        counted.func(before_2_13, count, *tensors, 0.0)
        == counted(*tensors, 0.0)
        == products * 2**3 * 2 * 6 * 6 * 8
    )
