import pytest
import torch
from architectures import MODELS, build
from peft import PromptTuningConfig, get_peft_model
from tiny import llama, spread

from hf_descent.early_exit import speculation_profile


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
    assert (
        speculation_profile(llama(num_layers=1), [torch.tensor([[5, 6, 7]])], repeats=1).best
        is None
    )
    adapted = get_peft_model(
        llama(num_layers=2), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    own = adapted.generation_config
    with pytest.raises(ValueError, match="is a PeftModel"):
        speculation_profile(adapted, [torch.tensor([[5, 6, 7]])])
    assert adapted.get_base_model().generation_config is own
    with pytest.raises(ValueError, match="is empty"):
        speculation_profile(llama(), [])
