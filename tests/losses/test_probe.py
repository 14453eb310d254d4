"""What the probes on the first batch need, and that they find the same on its beginnings."""

import pytest
import torch
from architectures import DECODER, IMAGE, MODELS, SPEECH, TEXT, build
from naive_head import LiveStorage
from tiny.models import llama
from transformers import ViTConfig

from hf_descent import layer_losses
from hf_descent.configs import DescentArguments
from hf_descent.losses.layerwise import find_layer_losses
from hf_descent.losses.task import TaskLoss
from hf_descent.models import ViTDenoiserConfig, ViTForDenoising
from hf_descent.training.objective import DescentObjective


LAYERS, VOCAB, LENGTH = 3, 2048, 200


def model():
    made = llama(LAYERS)
    made.resize_token_embeddings(VOCAB)
    return made.train()


def batch(kind):
    ids = torch.randint(
        3, VOCAB, (1 if kind == "packed" else 4, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    inputs = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    if kind == "padded":
        inputs["attention_mask"][1, 20:] = inputs["attention_mask"][2, 150:] = 0
    elif kind == "padded on the left":
        inputs["attention_mask"][1, :-20] = inputs["attention_mask"][2, :-150] = 0
    elif kind == "long prompts":
        inputs["labels"][:, :-30] = -100
    elif kind == "packed":
        del inputs["attention_mask"]
        inputs["position_ids"] = torch.cat([torch.arange(30), torch.arange(LENGTH - 30)])[None]
    if kind != "packed":
        inputs["labels"][inputs["attention_mask"] == 0] = -100
    return inputs


KINDS = ["plain", "padded", "padded on the left", "long prompts", "packed"]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_found_on_beginnings_have_the_losses_of_the_whole_batch(kind):
    made, inputs = model(), batch(kind)
    task = TaskLoss.probe(made, inputs, accepts_items=True)
    short = task.short(inputs)
    assert short["labels"][:, 1:].ne(-100).any() and short["labels"].numel() <= 2 * 32
    if "padded" in kind:
        assert {20, 32} == set(short["attention_mask"].sum(1).tolist())
    layers = find_layer_losses(made, inputs, task)
    assert task.shifts_labels and task.divides_by_items(inputs)
    torch.testing.assert_close(
        layers.evaluation_losses(made, inputs).means, layer_losses(made, inputs).detach()
    )


ROWS = 4
LONG = TEXT | {"num_hidden_layers": 12, "max_position_embeddings": LENGTH}
PICTURES = IMAGE | {"num_hidden_layers": 12, "hidden_size": 96, "image_size": 32}


def other_setting(kind):
    """A model, and a batch whose inputs or labels are no tokens; the first three rows have the same label."""
    torch.manual_seed(0)
    labels, pixels = torch.tensor([1, 1, 1, 0]), torch.rand(ROWS, 3, 32, 32)
    if kind == "denoiser":
        made = ViTForDenoising(
            ViTDenoiserConfig(encoder_config=ViTConfig(**PICTURES), readout="linear")
        )
        return made, {"pixel_values": pixels + 0.1 * torch.randn_like(pixels), "labels": pixels}
    if kind == "images":
        return build("ViTForImageClassification", PICTURES), {
            "pixel_values": pixels,
            "labels": labels,
        }
    if kind == "audio":
        name = "Wav2Vec2ForSequenceClassification"
        fields = MODELS[name] | {"layerdrop": 0.0, "mask_time_prob": 0.0, "attention_dropout": 0.0}
        mask = (
            torch.arange(2000) < torch.tensor([2000, 1500, 2000, 900])[:, None]
        ).long()  # [rows, samples]
        return build(name, fields), {
            "input_values": torch.randn(ROWS, 2000),
            "attention_mask": mask,
            "labels": labels,
        }
    if kind == "speech to text":
        tokens = torch.randint(5, 99, (ROWS, 8))
        return build("WhisperForConditionalGeneration", SPEECH | {"decoder_start_token_id": 2}), {
            "input_features": torch.randn(ROWS, 8, 80), "labels": tokens
        }  # fmt: skip
    name = {"choices": "RobertaForMultipleChoice", "answers": "BertForQuestionAnswering"}.get(kind)
    ids = torch.randint(5, 99, (ROWS, 2, LENGTH // 2) if kind == "choices" else (ROWS, LENGTH))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "answers":
        return build(name, LONG), given | {
            "start_positions": 50 + labels,
            "end_positions": 60 + labels,
        }
    return build(name or "BertForSequenceClassification", LONG), given | {"labels": labels}


OTHERS = ["denoiser", "images", "audio", "speech to text", "choices", "answers", "long rows"]


@pytest.mark.parametrize("kind", OTHERS)
def test_the_probe_takes_two_rows_of_what_is_no_token_and_finds_the_same(kind):
    (made, inputs), rows = other_setting(kind), set()
    made.register_forward_pre_hook(
        lambda _, args, given: rows.update(len(v) for v in given.values() if torch.is_tensor(v)),
        with_kwargs=True,
    )
    with LiveStorage() as probe:
        objective = DescentObjective(
            made, [inputs], DescentArguments(initial_loss_bound=2.0), max_steps=10
        )
    assert rows == {2}
    made.train().gradient_checkpointing_enable(
        {"use_reentrant": False}
    )  # which leaves the step the least
    with LiveStorage() as step:
        objective(made, inputs).backward()
    assert probe.peak <= step.peak
    made.eval().gradient_checkpointing_disable()
    layers = find_layer_losses(made, inputs, TaskLoss.probe(made, inputs))
    torch.testing.assert_close(
        layers.evaluation_losses(made, inputs).means, layer_losses(made, inputs).detach()
    )


def test_of_rows_with_as_much_padding_two_have_different_labels():
    made, inputs = other_setting("long rows")
    assert TaskLoss.probe(made, inputs).short(inputs)["labels"].tolist() == [1, 0]


def test_images_that_belong_to_tokens_stay_with_them():
    eye = IMAGE | {"model_type": "clip_vision_model", "image_size": 8}
    fields = {
        "vision_config": eye,
        "text_config": DECODER | {"model_type": "llama"},
        "image_token_index": 98,
    }
    made = build("LlavaForConditionalGeneration", fields)
    per_image = (8 // 4) ** 2
    for images in ([2, 0, 1, 1], [1, 1, 1, 1]):
        ids = torch.randint(5, 90, (ROWS, 12))
        for row, count in enumerate(images):
            ids[row, : count * per_image] = 98
        inputs = {
            "input_ids": ids,
            "labels": ids.clone(),
            "pixel_values": torch.rand(ROWS, 3, 8, 8),
        }
        task = TaskLoss.probe(made, inputs)
        assert len(task.short(inputs)["input_ids"]) == (ROWS if 2 in images else 2)
        layers = find_layer_losses(made, inputs, task)
        torch.testing.assert_close(
            layers.evaluation_losses(made, inputs).means, layer_losses(made, inputs).detach()
        )


@pytest.mark.parametrize("kind", ["bands", "permutations"])
def test_what_only_looks_like_tokens_stays_whole(kind):
    """As many bands of a sound, or rows and columns of a matrix, as there are labels in a row."""
    tokens = torch.randint(5, 99, (ROWS, 40))
    if kind == "bands":
        made = build(
            "WhisperForConditionalGeneration",
            SPEECH | {"num_mel_bins": 40, "decoder_start_token_id": 2},
        )
        inputs = {"input_features": torch.randn(ROWS, 40, 80), "labels": tokens}
    else:
        made = build("XLNetLMHeadModel", MODELS["XLNetForSequenceClassification"])
        inputs = {
            "input_ids": tokens,
            "labels": tokens,
            "perm_mask": torch.ones(ROWS, 40, 40).triu(),
        }
    layers = find_layer_losses(made, inputs, TaskLoss.probe(made, inputs))
    torch.testing.assert_close(
        layers.evaluation_losses(made, inputs).means, layer_losses(made, inputs).detach()
    )


def among_tokens(kind):
    """A model of many classes and long rows of which not all inputs are tokens."""
    torch.manual_seed(0)
    text = DECODER | {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": LENGTH}
    tokens = torch.randint(5, VOCAB - 1, (ROWS, LENGTH))
    if kind == "embeddings":
        return build("LlamaForCausalLM", text), {
            "inputs_embeds": torch.randn(ROWS, LENGTH, 32),
            "labels": tokens,
        }
    if kind == "speech":
        sizes = {"vocab_size": VOCAB, "max_target_positions": LENGTH, "decoder_start_token_id": 2}
        made = build("WhisperForConditionalGeneration", SPEECH | sizes)
        return made, {"input_features": torch.randn(ROWS, 8, 80), "labels": tokens}
    eye = IMAGE | {"model_type": "clip_vision_model", "image_size": 8}
    fields = {"vision_config": eye, "text_config": text, "image_token_index": VOCAB - 1}
    mask = torch.ones_like(tokens)
    mask[1, :9] = int("left" not in kind)
    for row, count in enumerate([2, 1, 1, 0] if "uneven" in kind else [1] * ROWS):
        tokens[row, 10 : 10 + 4 * count] = VOCAB - 1
    given = {"input_ids": tokens, "attention_mask": mask, "pixel_values": torch.rand(ROWS, 3, 8, 8)}
    return build("LlavaForConditionalGeneration", fields), given | {
        "labels": tokens.where(mask == 1, -100)
    }


def fused_text(kind):
    return model(), batch(kind)


@pytest.mark.parametrize(
    ("setting", "kind"),
    [*((fused_text, kind) for kind in KINDS)]
    + [
        (among_tokens, kind)
        for kind in ("embeddings", "speech", "images", "uneven images", "images, left")
    ],
)
def test_the_probe_needs_no_more_memory_than_the_step(setting, kind):
    made, inputs = setting(kind)
    args = DescentArguments(
        readout_token_fraction=None if kind == "speech" else 0.25
    )  # which is read by replay
    with LiveStorage() as probe:
        objective = DescentObjective(made, [inputs], args, max_steps=10)
    with LiveStorage() as step:
        objective(made, inputs).backward()
    assert probe.peak <= step.peak
    made.eval()
    layers = find_layer_losses(made, inputs, TaskLoss.probe(made, inputs))
    torch.testing.assert_close(
        layers.evaluation_losses(made, inputs).means, layer_losses(made, inputs).detach()
    )
