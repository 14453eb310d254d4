"""Saved runs, whole and as adapters, against what was saved."""

import dataclasses
import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers
from architectures import DECODER, FAMILIES, GPT, MODELS, build
from tiny.data import classification_data
from tiny.models import bert, llama
from tiny.training import config, trained
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_descent.commands import classify
from hf_descent.commands.classify import ModelArguments
from hf_descent.loading import (
    architecture_of,
    has_position_table,
    load_model,
    load_tokenizer,
    position_limit,
)


@pytest.mark.parametrize("kind", ["CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_is_put_on_its_base(kind, tmp_path):
    peft = pytest.importorskip("peft")
    base, loader = (
        (llama(), AutoModelForCausalLM)
        if kind == "CAUSAL_LM"
        else (bert(), AutoModelForSequenceClassification)
    )
    base.config.noise_sigma = 0.5
    if kind == "SEQ_CLS":
        base.config.id2label = {
            0: "x",
            1: "y",
            2: "z",
        }  # which the adapter's training may number otherwise
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type=kind, init_lora_weights=False, target_modules="all-linear")
    model = peft.get_peft_model(loader.from_pretrained(tmp_path / "base"), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "descent_config.json").write_text(
        json.dumps({"noise_sigma": 0.25, "pad_token_id": 7})
    )
    loaded, ids = load_model(str(tmp_path / "adapter")), torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        assert not torch.equal(loaded(ids).logits, base.eval()(ids).logits)
    # Of its own training, not its base's.
    assert (loaded.config.noise_sigma, loaded.config.pad_token_id) == (0.25, 7)
    if kind == "SEQ_CLS":
        assert loaded.config.id2label == {number: f"LABEL_{number}" for number in range(3)}
        summary = {"noise_sigma": 0.25, "id2label": {"0": "z", "1": "x", "2": "y"}}
        (tmp_path / "adapter" / "descent_config.json").write_text(json.dumps(summary))
        assert load_model(str(tmp_path / "adapter")).config.id2label == {0: "z", 1: "x", 2: "y"}
    assert architecture_of(str(tmp_path / "adapter")).endswith(
        type(base).__name__.removeprefix("Llama").removeprefix("Bert")
    )


def test_models_of_other_kinds_are_refused(tmp_path):
    transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a ViTForImageClassification; give a text classifier"):
        load_model(str(tmp_path))


def test_weights_that_do_not_fit_or_are_damaged_are_named(tmp_path):
    bert().save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    labels = len(json.loads(saved)["id2label"])
    arguments = ModelArguments(model_name_or_path=str(tmp_path))
    loads = (
        (load_model, str(tmp_path)),
        (partial(classify.load_model, classes=["x"] * labels), arguments),
    )
    with pytest.raises(
        ValueError, match=f"' have {labels} labels, the data 5; `--pooling cls_linear"
    ):
        classify.load_model(arguments, list("abcde"))
    for pooling in ("cls_linear", "mean_linear"):  # the remedy
        remedied = classify.load_model(
            dataclasses.replace(arguments, pooling=pooling), list("abcde")
        )
        assert remedied.config.num_labels == 5
    (tmp_path / "config.json").write_text(json.dumps(json.loads(saved) | {"intermediate_size": 24}))
    for load, name in loads:
        with pytest.raises(ValueError, match=f"{tmp_path.name}' do not fit its config"):
            load(name)
    (tmp_path / "config.json").write_text(saved)
    weights = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (weights[:-8], b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        for load, name in loads:
            with pytest.raises(ValueError, match=f"{tmp_path.name}' are damaged"):
                load(name)


def test_an_adapter_whose_base_has_another_width_is_named(tmp_path):
    peft = pytest.importorskip("peft")
    bert().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    config = model.config
    config.intermediate_size = 24
    type(model)(config).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="adapter' do not fit its config or its base"):
        load_model(str(tmp_path / "adapter"))


def test_a_config_without_an_architecture_is_named(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"{tmp_path.name}', a model whose config names no architecture; give a"
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5", "mbart", "nllb-moe"])
def test_a_tokenizer_that_knows_no_word_is_not_the_models(kind, tmp_path):
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"No tokenizer in .*{tmp_path.name}': save it there"):
        load_tokenizer(str(tmp_path))
    transformers.AutoConfig.for_model("perceiver").save_pretrained(
        tmp_path
    )  # reads bytes, and needs no file
    assert load_tokenizer(str(tmp_path))("ab")["input_ids"][1:-1] == [6 + ord("a"), 6 + ord("b")]


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (transformers.LlamaConfig(max_position_embeddings=64), 64),
        (transformers.GPT2Config(n_positions=32), 32),
        (transformers.BloomConfig(), None),  # no field
        (transformers.XLNetConfig(), None),  # -1
        (transformers.Gemma3Config(text_config={"max_position_embeddings": 16}), 16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_limit_of_positions_is_the_configs(config, limit):
    model = torch.nn.Module()
    model.config = config
    assert position_limit(model) == limit


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if not {"image_size", "conv_dim"} & MODELS[name].keys()]
)
def test_models_without_a_table_of_positions_take_more_than_they_state(name):
    model = build(name, MODELS[name])
    length = (position_limit(model) or 40) + 3
    ids = torch.full((1, 2, length) if "MultipleChoice" in name else (1, length), 5)
    ids[..., -1] = 2  # BART's end
    given = {"input_ids": ids} | (
        {"decoder_input_ids": ids} if "ConditionalGeneration" in name else {}
    )
    with pytest.raises((IndexError, RuntimeError)) if has_position_table(model) else nullcontext():
        model(**given)


EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EYE |= {"image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}


LLAVA = {"vision_config": EYE, "text_config": DECODER | {"model_type": "llama"}}


@pytest.mark.parametrize(
    ("name", "fields", "refused"),
    [
        ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, True),  # tables in buffers
        ("CodeGenForCausalLM", GPT | {"n_ctx": 40, "rotary_dim": 4}, True),
        ("CTRLLMHeadModel", GPT | {"dff": 16}, True),
        ("LlavaForConditionalGeneration", LLAVA, False),  # the table is of patches
    ],
)
def test_a_table_may_be_a_buffer_and_another_towers_does_not_count(name, fields, refused):
    model = build(name, fields)
    assert has_position_table(model) == refused
    with pytest.raises((IndexError, RuntimeError)) if refused else nullcontext():
        model(input_ids=torch.full((1, position_limit(model) + 3), 5))


def test_as_many_tokens_as_the_limit_are_taken_and_no_more():
    """RoBERTa's positions begin behind the padding's; a prompt of PEFT takes some."""
    peft = pytest.importorskip("peft")
    shape = {"vocab_size": 40, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**shape, max_position_embeddings=20, intermediate_size=8)
    gpt2 = transformers.GPT2Config(vocab_size=40, n_positions=20, n_embd=8, n_layer=1, n_head=2)
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    prompted = peft.get_peft_model(transformers.GPT2LMHeadModel(gpt2), tuning)
    tuned = peft.get_peft_model(
        transformers.GPT2LMHeadModel(gpt2), peft.LoraConfig(target_modules=["wpe"])
    )
    for model, limit in (
        (transformers.RobertaForCausalLM(config), 18),
        (prompted, 15),
        (tuned, 20),
    ):
        assert position_limit(model) == limit and has_position_table(model)
        model(torch.full((1, limit), 5))
        with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
            model(torch.full((1, limit + 1), 5))


def test_a_model_of_a_readout_of_its_own_is_not_read_by_its_head(tmp_path):
    def second_token(model, hidden, inputs):
        return model.classifier(hidden[:, 1])

    args = config(tmp_path, max_steps=1)
    trained(bert(), args, train_dataset=classification_data(8), readout=second_token).save_model()
    with pytest.raises(ValueError, match="custom readout"):
        load_model(str(tmp_path))
