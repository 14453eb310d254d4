"""What the probes on the first batch need, and that they find the same on its beginnings."""

import pytest
import torch
from naive_head import LiveStorage
from tiny import llama

from hf_descent import layer_losses
from hf_descent.configs import DescentArguments
from hf_descent.losses.layerwise import find_layer_losses
from hf_descent.losses.task import TaskLoss
from hf_descent.training.custom_loop import DescentObjective


LAYERS, VOCAB, LENGTH = 3, 2048, 200


def model():
    made = llama(LAYERS)
    made.resize_token_embeddings(VOCAB)
    return made.train()


def batch(kind):
    ids = torch.randint(3, VOCAB, (1 if kind == "packed" else 4, LENGTH), generator=torch.Generator().manual_seed(0))
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
    torch.testing.assert_close(layers.measure(made, inputs).means, layer_losses(made, inputs).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_needs_no_more_memory_than_the_step(kind):
    made, inputs = model(), batch(kind)
    args = DescentArguments(readout_token_fraction=0.25)
    with LiveStorage() as probe:
        objective = DescentObjective(made, [inputs], args, max_steps=10)
    with LiveStorage() as step:
        objective(made, inputs).backward()
    assert probe.peak <= step.peak
