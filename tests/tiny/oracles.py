"""Truths that share no code with the package."""

import copy

import torch
import torch.nn.functional as F


def truncated(model, layers):
    """The model with its upper layers cut off."""
    model = copy.deepcopy(model)
    model.base_model.encoder.layer = model.base_model.encoder.layer[:layers]
    return model


def naive_layer_losses(model, batch):
    """BERT's layer losses `[layers]` by its hidden states, pooler and classifier."""
    outputs = model.bert(batch["input_ids"], batch["attention_mask"], output_hidden_states=True)
    losses = []
    for hidden in outputs.hidden_states[1:]:
        logits = model.classifier(model.bert.pooler(hidden))
        losses.append(F.cross_entropy(logits, batch["labels"]))
    return torch.stack(losses)


def pool(hidden, mask, pooling):
    """The first token, or the mean of those that the mask keeps, one row at a time: `[batch, hidden]`."""
    rows = []
    for row, keep in zip(hidden, mask):
        rows.append(row[0] if pooling == "cls" else row[keep.bool()].mean(0))
    return torch.stack(rows)


def assert_equal_runs(one, other):
    """The same weights, and multipliers where there are some, to the last bit."""
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    if one.multipliers is not None:
        assert torch.equal(one.multipliers.values, other.multipliers.values)
