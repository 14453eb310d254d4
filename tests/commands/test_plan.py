"""`hf-descent plan`: a recipe and a config in, a table out."""

import contextlib
import io
import re
import shutil
import sys

import pytest
import yaml
from transformers import AutoConfig

from hf_descent import cli
from hf_descent.commands import plan


CONFIGS = {"llama": {"num_key_value_heads": 2}, "bert": {}}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
GEMMA3 = {  # without a padding token in the config of its text
    "text_config": TEXT | {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None},
    "vision_config": VISION | {"image_size": 28, "patch_size": 14},
}
RECIPES = {
    "llama": {
        "objective": "descent",
        "max_length": 24,
        "completion_only_loss": True,
        "dtype": "float32",
    },
    "bert": {"pooling": "cls_linear", "max_seq_length": 24, "text_column": "text"},
}


def recipe(kind, tmp_path, vocab_size=50, **settings):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
    }
    sizes = {name: size for name, size in (sizes | CONFIGS[kind]).items() if size is not None}
    AutoConfig.for_model(kind, vocab_size=vocab_size, **sizes).save_pretrained(tmp_path / "model")
    values = RECIPES[kind] | {
        "model_name_or_path": str(tmp_path / "model"),
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values | settings))
    return str(path)


def test_a_config_beside_the_recipe_stands_for_the_model_of_the_hub(tmp_path):
    path = recipe("llama", tmp_path, model_name_or_path="nobody/nothing")
    _, _, model_args, *_ = plan.parse([path], "plan", "")
    assert model_args.model_name_or_path == "nobody/nothing"
    shutil.copy(tmp_path / "model" / "config.json", tmp_path)
    _, _, model_args, *_ = plan.parse([path], "plan", "")
    assert model_args.model_name_or_path == str(tmp_path)
    for other in ("nobody/other", str(tmp_path / "model")):
        _, _, model_args, *_ = plan.parse([path, "--model_name_or_path", other], "plan", "")
        assert model_args.model_name_or_path == other


def cells(printed):
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_recipe_is_planned_from_a_config_alone(kind, tmp_path, capsys):
    cli.main(
        [
            "plan",
            recipe(kind, tmp_path),
            "--gpu_memory",
            "1GiB",
            "--per_device_train_batch_size",
            "4",
        ]
    )
    printed = capsys.readouterr().out
    rows = cells(printed)
    names = ["as configured (4 x 24 tokens)", "plain training (`objective: erm`)"]
    names += [f"`activation_checkpointing: {kind == 'bert'}`"]  # TRL's default
    names += ["`readout_token_fraction: 0.1`"] if kind == "llama" else []
    names += ["`per_device_train_batch_size: 8`", "`use_peft: True`"]
    assert list(rows) == [
        *names,
        *(f"`--launch {name}`, 8 processes" for name in ("zero2", "zero3", "fsdp2")),
    ]
    assert {row[-1] for row in rows.values()} == {"yes"}
    assert (
        re.search(r"3 layers, 0\.0 million weights", printed)
        and "times the operations of plain" in printed
    )
    assert not (tmp_path / "run").exists()


def test_an_unrolled_transformer_is_planned(tmp_path, capsys):
    cli.main(["plan", recipe("bert", tmp_path, pooling="head", unrolled_layers=2)])
    assert capsys.readouterr().out.startswith("UTForSequenceClassification: 2 layers")


@pytest.fixture(scope="module")
def plan_of_a_classifier(tmp_path_factory):
    """What is printed for a recipe with micro-batches, and with a setting that is refused where there is no GPU."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "tf32": True}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(["plan", recipe("bert", tmp_path_factory.mktemp("plan"), **settings)])
    return printed.getvalue()


def test_micro_batches_are_named(plan_of_a_classifier):
    assert "as configured (4 micro-batches of 2 x 24 tokens)" in cells(plan_of_a_classifier)


def test_what_the_launchers_rows_hold_is_said(plan_of_a_classifier):
    assert "bf16 and float32 shards of what is trained" in plan_of_a_classifier
    assert "Examples of a `dual_dataset`" in plan_of_a_classifier


def test_what_is_compared_and_what_fits_is_said(plan_of_a_classifier):
    assert "that of the stock `Trainer`, with the logits of all tokens" in plan_of_a_classifier
    assert "As configured, the step fits into 80GiB and takes " in plan_of_a_classifier


def test_what_does_not_fit_is_said(tmp_path, capsys):
    cli.main(["plan", recipe("llama", tmp_path), "--gpu_memory", "1KiB"])
    printed = capsys.readouterr().out
    assert {row[-1] for row in cells(printed).values()} == {"no"}
    assert "As configured, the step does not fit into 1KiB" in printed


@pytest.mark.parametrize(
    ("kind", "of", "sizes", "layers"),
    [
        (
            "mixtral",
            "llama",
            {"num_key_value_heads": 2, "num_local_experts": 4},
            "MixtralForCausalLM: 3 layers",
        ),
        pytest.param("falcon", "llama", {}, "FalconForCausalLM: 3 layers", marks=pytest.mark.slow),
        (
            "gpt2",
            "bert",
            {},
            "GPT2ForSequenceClassification: 3 layers",
        ),  # padded with a token of the tokenizer
        pytest.param(
            "qwen3_moe",
            "bert",
            {"num_key_value_heads": 1, "num_experts": 8},
            "Qwen3MoeForSequenceClassification: 3 la",
            marks=pytest.mark.slow,
        ),
        ("gemma3", "bert", GEMMA3, "Gemma3ForSequenceClassification: 3 layers"),
    ],
)
def test_models_of_other_kinds_are_planned(kind, of, sizes, layers, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CONFIGS, kind, sizes)
    monkeypatch.setitem(RECIPES, kind, RECIPES[of] | ({"pooling": "head"} if of == "bert" else {}))
    cli.main(["plan", recipe(kind, tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith(layers) and {row[-1] for row in cells(printed).values()} == {"yes"}


@pytest.mark.parametrize(
    ("kind", "of", "sizes", "name", "reason"),
    [
        ("bart", "bert", {}, "BartForSequenceClassification", "goes by values"),
        (
            "t5",
            "bert",
            {"decoder_start_token_id": 0},
            "T5ForSequenceClassification",
            "goes by values",
        ),
        # Whose loops over tokens would take minutes, and are no kernels of a GPU.
        (
            "mamba",
            "llama",
            {"num_attention_heads": None},
            "MambaForCausalLM",
            "for what has no attention",
        ),
    ],
)
def test_models_that_cannot_be_planned_are_named(
    kind, of, sizes, name, reason, tmp_path, monkeypatch
):
    monkeypatch.setitem(CONFIGS, kind, sizes)
    monkeypatch.setitem(RECIPES, kind, RECIPES[of] | ({"pooling": "head"} if of == "bert" else {}))
    with pytest.raises(
        ValueError, match=rf"^{name} cannot be planned \(measure .*`skip_memory.*{reason}"
    ):
        cli.main(["plan", recipe(kind, tmp_path)])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"load_in_4bit": True}, "`load_in_4bit` is True, which cannot be planned"),
        (
            "llama",
            {"activation_checkpointing_kwargs": {"offload": True}},
            "`offload` is True, which cannot",
        ),
        ("llama", {"activation_offloading": True}, "`activation_offloading` is True"),
        (
            "llama",
            {"model_init_kwargs": {"dtype": "bfloat16"}},
            "`model_init_kwargs` is {'dtype': 'bfloat16'}",
        ),
        ("llama", {"attn_implementation": "eager"}, "`attn_implementation` is 'eager'"),
        ("llama", {"packing": True}, "`packing` is True"),
        ("llama", {"loss_type": "dft"}, "`loss_type` is 'dft'"),
        ("llama", {"use_liger_kernel": True}, "`use_liger_kernel` is True"),
        ("llama", {"label_smoothing_factor": 0.1}, r"`label_smoothing_factor` is 0\.1"),
        (
            "bert",
            {"optim": "paged_adamw_32bit"},
            "`optim` is .*paged_adamw_32bit.*, which cannot be planned",
        ),
        ("bert", {"torch_compile": True}, "`torch_compile` is True"),
        ("bert", {"fsdp": "full_shard"}, "`fsdp` is True"),
        ("bert", {"max_seq_length": None}, "set `max_seq_length`"),
        ("bert", {"processes": 0}, "`processes` is 0"),
        ("bert", {"gpu_memory": "lots"}, "lots|size"),
        (
            "bert",
            {"poolings": "head"},
            r"sets \['poolings'\], which `hf-descent plan` does not have",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(kind, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        cli.main(["plan", recipe(kind, tmp_path, **settings)])


def test_a_classifier_is_planned_without_trl(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "hf_descent.commands.sft", raising=False)
    module, *_ = plan.parse([recipe("bert", tmp_path)], "hf-descent plan", "")
    assert module.__name__ == "hf_descent.commands.classify"
    with pytest.raises(ModuleNotFoundError, match="trl"):
        plan.parse([recipe("llama", tmp_path)], "hf-descent plan", "")


def test_a_recipe_that_suits_both_commands_is_one_of_sft(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": "model", "output_dir": "run"})
    )
    module, *_ = plan.parse([str(tmp_path / "recipe.yaml")], "hf-descent plan", "")
    assert module.__name__ == "hf_descent.commands.sft"


def test_one_recipe_is_needed():
    with pytest.raises(ValueError, match="The recipe is missing"):
        plan.parse([], "hf-descent plan", "")


def test_a_recipe_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(yaml.YAMLError, match=r"bad\.yaml"):
        plan.parse([str(tmp_path / "bad.yaml")], "hf-descent plan", "")
