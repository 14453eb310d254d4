from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import MODELS, build
from peft import PromptTuningConfig, get_peft_model
from tiny import llama, spread

from hf_descent.early_exit import SpeculationProfile, speculation_profile, truncate


def test_self_speculation_gives_the_greedy_text_and_the_acceptance_of_each_exit(monkeypatch):
    model = spread(llama(num_layers=3))
    model.generation_config.eos_token_id = None
    prompts = [torch.tensor([[3, 4, 5]]), torch.tensor([[7, 8, 9, 10]])]
    for fastest, kept in ((3, [*range(5, 25)]), (1, None)):  # the first draft with a shortlist, and that without
        seconds = 4.0 - 2 * np.eye(5)[fastest]
        monkeypatch.setattr("hf_descent.early_exit.profile.turns", lambda *_, seconds=seconds: seconds)
        profile = speculation_profile(model, prompts, max_new_tokens=12, repeats=1, shortlist=range(5, 25))
        assert profile.equal.tolist() == [1.0, 1.0] and profile.shortlist == kept
        assert sorted(profile.speedups) == [1.0, 2.0]
    for layer in (1, 2):
        short, hits = truncate(model, layer, {"input_ids": prompts[0]}), 0
        for prompt in prompts:
            text = model.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
            for end in range(prompt.shape[1], text.shape[1]):
                with torch.no_grad():
                    hits += int(short(text[:, :end]).logits[0, -1].argmax() == text[0, end])
        assert profile.acceptance[layer - 1] == pytest.approx(hits / 24)
    assert model.config.num_hidden_layers == 3


def test_the_four_exits_whose_drafts_should_pay_most_are_timed():
    model = spread(llama(num_layers=8))
    model.generation_config.eos_token_id = None
    with torch.no_grad():  # the layers above the third do nothing
        for layer in model.model.layers[3:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    profile = speculation_profile(model, [torch.tensor([[3, 4, 5]])], max_new_tokens=8, repeats=1)
    assert profile.acceptance[2:].tolist() == [1.0] * 5 and profile.acceptance[:2].max() < 1
    timed = np.isfinite(profile.tokens_per_second)
    assert timed[2:5].all() and timed.sum() == 4


def test_the_best_exit_is_the_fastest_or_none():
    nan = float("nan")
    profile = SpeculationProfile([0.1, 0.9, 0.9], [nan, 30.0, 25.0], 20.0, [nan, 1.0, 1.0])
    assert profile.best == 2 and "draft_with(2)" in str(profile)
    assert "draft_with(2, shortlist)" in str(replace(profile, shortlist=[3, 4]))
    slow = SpeculationProfile([0.1, 0.2], [nan, 10.0], 20.0, [nan, 1.0])
    assert slow.best is None and "plain decoding" in str(slow)


@pytest.mark.parametrize(
    "own",
    [
        {"num_beams": 3},
        {"repetition_penalty": 3.0, "do_sample": True, "top_k": 5},  # as of many chat models
        {"num_return_sequences": 2, "do_sample": True},
        {"return_dict_in_generate": True},
        {"use_cache": False},
    ],
)
def test_generation_is_greedy_whatever_the_model_does_by_default(own):
    model, prompts = spread(llama(2)), [torch.arange(5, 11)[None]]
    greedy = speculation_profile(model, prompts, max_new_tokens=24, repeats=1)
    model.generation_config.update(**own)
    before = model.generation_config.to_dict()
    profile = speculation_profile(model, prompts, max_new_tokens=24, repeats=1)
    assert profile.acceptance == greedy.acceptance and profile.equal == greedy.equal == 1
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_models_that_are_no_decoders_are_refused(name):
    with pytest.raises(ValueError, match="give a decoder"):
        speculation_profile(build(name, MODELS[name]), [torch.tensor([[5, 6, 7]])])


def test_a_single_layer_decodes_plainly_and_adapters_and_no_prompts_are_refused():
    assert speculation_profile(llama(num_layers=1), [torch.tensor([[5, 6, 7]])], repeats=1).best is None
    adapted = get_peft_model(llama(num_layers=2), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    own = adapted.generation_config
    with pytest.raises(ValueError, match="is a PeftModel"):
        speculation_profile(adapted, [torch.tensor([[5, 6, 7]])])
    assert adapted.get_base_model().generation_config is own
    with pytest.raises(ValueError, match="is empty"):
        speculation_profile(llama(), [])
