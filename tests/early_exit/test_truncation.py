import json

import pytest
import torch
import transformers
from architectures import DECODER, FAMILIES, LAYERS, MODELS, TwoStage, batch_for, build, depth_of
from tiny.data import classification_data
from tiny.models import bert, llama, spread
from tiny.training import config, trained
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_descent import early_exit, layer_logits
from hf_descent.early_exit import keep_layers, truncate
from hf_descent.early_exit.truncation import example_inputs
from hf_descent.models import (
    DustConfig,
    DustForVideoDenoising,
    UTConfig,
    UTForVideoDenoising,
    ViTDenoiserConfig,
    ViTForDenoising,
)
from hf_descent.readout.replay import output_logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_truncated_model_has_the_logits_of_its_layer_before_and_after_it_is_saved(name, tmp_path):
    model = build(name, MODELS[name])
    inputs = batch_for(model)
    with torch.no_grad():
        truth = layer_logits(model, inputs)
        for layer in range(1, LAYERS + 1):
            makes_up = layer == 2 and not name.endswith(
                ("ForMultipleChoice", "Wav2Vec2ForSequenceClassification")
            )
            short = truncate(model, layer, None if makes_up else inputs)
            assert torch.equal(output_logits(short(**inputs)), truth[layer - 1])
            short.save_pretrained(tmp_path / str(layer))
            loaded = type(model).from_pretrained(tmp_path / str(layer))
            # Products of weights that lie elsewhere in memory may round differently.
            torch.testing.assert_close(
                output_logits(loaded(**inputs)), truth[layer - 1], rtol=1e-5, atol=1e-5
            )
        assert getattr(model.config, depth_of(MODELS[name])) == LAYERS


@pytest.mark.parametrize("kind", ["ut", "dust", "vit"])
def test_denoisers_need_no_batch(kind):
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    if kind == "vit":
        encoder = transformers.ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=3)
        model = ViTForDenoising(ViTDenoiserConfig(encoder_config=encoder))
    elif kind == "ut":
        model = UTForVideoDenoising(UTConfig(hidden_size=16, num_hidden_layers=3))
    else:
        model = DustForVideoDenoising(
            DustConfig(hidden_size=16, dictionary_size=32, num_hidden_layers=3)
        )
    model.eval()
    short, inputs = truncate(model, 2), example_inputs(model)
    assert len(inputs["pixel_values"]) == 2
    with torch.no_grad():
        assert torch.equal(short(**inputs).logits, layer_logits(model, inputs)[1])
    assert short.config != model.config


def test_a_truncated_model_stands_alone_and_counts_its_layers(tmp_path):
    model = bert(num_layers=4).train()
    state = torch.get_rng_state()
    short = truncate(model, 2)
    assert short.training and model.training and torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.zero_()
    assert short.bert.encoder.layer[0].output.dense.weight.any()
    short.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 2
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(loaded.bert.encoder.layer) == 2


def test_a_model_cast_by_hand_is_cut_with_its_cast_buffers():
    model = llama().bfloat16()  # the frequencies of its positions, too
    assert truncate(model, 2).model.rotary_emb.inv_freq.dtype == torch.bfloat16


def test_a_model_trained_in_mixed_precision_is_cut_as_it_is_loaded(tmp_path):
    trainer = trained(
        spread(bert()),
        config(tmp_path, bf16=True, max_steps=1),
        train_dataset=classification_data(),
    )
    trainer.save_model()
    inputs, loaded = (
        example_inputs(trainer.model),
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
    )
    torch.testing.assert_close(
        truncate(trainer.model, 2)(**inputs).logits, layer_logits(loaded, inputs)[1]
    )


def test_lists_with_an_entry_per_layer_are_cut_and_tied_weights_stay_tied(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(
        **MODELS["Qwen2ForCausalLM"],
        layer_types=types,
        use_sliding_window=True,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    short = truncate(model, 2)
    assert short.config.layer_types == types[:2] and config.layer_types == types
    assert short.lm_head.weight is short.model.embed_tokens.weight and short.dtype == torch.bfloat16
    short.generation_config.max_new_tokens = 3
    short.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == types[:2]
    assert short.generate(torch.tensor([[5, 6]]), do_sample=False).shape[1] <= 5


def test_lists_of_any_name_are_cut():
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LongformerConfig(**sizes, num_hidden_layers=3, attention_window=[4, 4, 4])
    assert truncate(
        transformers.LongformerForSequenceClassification(config), 2
    ).config.attention_window == [4, 4]


def test_a_hybrid_cut_below_its_first_attention_is_refused():
    """Its cache has no layer to take its length from."""
    model = transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**DECODER, layer_types=["conv", "full_attention", "conv"])
    )
    assert truncate(model, 2).config.layer_types == ["conv", "full_attention"]
    with pytest.raises(ValueError, match="cannot be cut to 1 of its 3 layers"):
        truncate(model, 1)


MINICPM = MODELS["LlamaForCausalLM"] | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
}
MINICPM |= {"head_dim": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


def test_a_model_whose_scale_depends_on_its_depth_is_refused():
    model = build("MiniCPM3ForCausalLM", MINICPM)
    with pytest.raises(ValueError, match="not those of layer 1"):
        truncate(model, 1)
    assert truncate(model, LAYERS).config.num_hidden_layers == LAYERS


def test_bad_arguments_to_truncate_are_named():
    for layers in (4, "2"):
        with pytest.raises(
            ValueError,
            match=f"`num_layers` is {layers!r}; BertForSequenceClassification has layers 1 to 3",
        ):
            truncate(bert(), layers)
    peft = pytest.importorskip("peft")
    adapter, added = peft.LoraConfig(task_type="CAUSAL_LM"), llama()
    added.add_adapter(adapter)
    for model in (
        TwoStage(),
        added,
        peft.get_peft_model(llama(), adapter),
        bert().to("meta"),
    ):  # as where offloaded
        with pytest.raises(
            TypeError, match=f"`model` is a {type(model).__name__}; .*in memory.*merge_and_unload"
        ):
            truncate(model, 1)
    model = bert()
    model.main_input_name = "spectrogram"
    with pytest.raises(ValueError, match="give `inputs`"):
        example_inputs(model)


@pytest.mark.parametrize("layers", [[1, 2], [1, 4]], ids=["first", "first-and-last"])
def test_a_shorter_model_drafts_as_an_assistant_and_the_text_stays(layers):
    model = spread(llama(num_layers=4)).eval()
    short = keep_layers(model, layers).eval()
    calls = []
    short.register_forward_hook(lambda *_: calls.append(1))
    for seed in range(3):
        ids = torch.randint(5, 40, (1, 6), generator=torch.Generator().manual_seed(seed))
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        plain = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, assistant_model=short, **options), plain)
        assert torch.equal(model.generate(ids, assistant_early_exit=2, **options), plain)
    assert calls


@pytest.mark.parametrize("name", ["draft_with", "speculation_profile", "SpeculationProfile"])
def test_what_drafted_says_what_to_use(name):
    with pytest.raises(ImportError, match=rf"`{name}` was removed .*assistant_model=truncate"):
        exec(f"from hf_descent.early_exit import {name}")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}s'"):
        getattr(early_exit, f"{name}s")
