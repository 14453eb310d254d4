import copy

import pytest
import torch
from naive_head import (
    BATCH,
    HIDDEN,
    LAYERS,
    SEQ,
    VOCAB,
    WEIGHTS,
    LiveStorage,
    Watch,
    naive_sums,
    setting,
)
from torch import nn

from hf_descent.readout import tiles
from hf_descent.readout.linear_cross_entropy import HeadLoss, labelled_tokens, tiled_layer_losses


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_tensor_is_larger_than_a_tile(monkeypatch, softcap):
    hidden, norm, head, labels = setting(ignored=0.0)
    tile = 10 * VOCAB
    assert VOCAB * HIDDEN < tile < BATCH * SEQ * VOCAB
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", {"cpu": tile})
    with Watch() as watch:
        out = tiled_layer_losses(
            hidden,
            labelled_tokens(labels, LAYERS - 1),
            norm,
            head,
            WEIGHTS,
            head_loss=HeadLoss(softcap=softcap),
        )
        out.objective.backward()
    assert VOCAB * HIDDEN < watch.largest <= tile


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_memory_grows_by_the_gradients_of_a_layers_tokens(monkeypatch, fraction):
    """Not by a gradient of its whole hidden state: of those one layer at a time has one."""
    batch, seq, hidden, vocab = 4, 64, 64, 256
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", {"cpu": 16 * vocab})
    norm, head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
    tokens = labelled_tokens(torch.randint(vocab, (batch, seq)), 43, shift=False, fraction=fraction)

    def step_bytes(layers):
        states = [torch.randn(batch, seq, hidden).requires_grad_()]
        for _ in range(layers):
            states.append(states[-1] * 0.9)
        with LiveStorage() as live:
            tiled_layer_losses(
                states[1:], tokens, norm, head, torch.ones(layers)
            ).objective.backward()
        return live.peak

    gradient = 4 * fraction * batch * seq * hidden
    assert 0.9 * gradient < (step_bytes(44) - step_bytes(24)) / 20 < 1.1 * gradient


def test_rounding_does_not_grow_with_the_number_of_tiles(monkeypatch):
    hidden, norm, head, labels = setting(dtype=torch.bfloat16, ignored=0.0)
    errors = []
    double = [state.detach().double() for state in hidden]
    exact_head = copy.deepcopy(head).double()
    (naive_sums(double, copy.deepcopy(norm).double(), exact_head, labels).sum()).backward()
    for rows in (1, BATCH * SEQ):
        monkeypatch.setattr(tiles, "TILE_ELEMENTS", {"cpu": rows * VOCAB})
        tiled_layer_losses(
            hidden, labelled_tokens(labels, LAYERS - 1), norm, head, torch.ones(LAYERS), num_items=1
        ).objective.backward()
        errors.append((head.weight.grad.double() - exact_head.weight.grad).norm())
        head.weight.grad = None
    assert errors[0] < 1.1 * errors[1]


def test_improbable_labels_keep_a_finite_loss():
    hidden, norm, head, labels = setting(dtype=torch.float32)
    with torch.no_grad():
        head.weight.mul_(1e4)
    expected = naive_sums(hidden, norm, head, labels)
    assert (expected > 1e3).any()
    out = tiled_layer_losses(
        hidden, labelled_tokens(labels, LAYERS - 1), norm, head, WEIGHTS.float()
    )
    torch.testing.assert_close(out.sums, expected.detach())


def test_sums_over_tokens_are_not_held_in_half_precision():
    hidden, tokens = (
        torch.full((1, 400, 4), 200.0, requires_grad=True),
        labelled_tokens(torch.zeros(1, 400).long()),
    )
    head = nn.Linear(4, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.zero_()[0] = -0.02  # the label is out of the question,
        head.weight[1] = 0.02  # and another class certain
    with torch.autocast("cpu", torch.float16):
        out = tiled_layer_losses([hidden], tokens, nn.Identity(), head, torch.ones(1), num_items=1)
    out.objective.backward()
    pushes = torch.zeros(VOCAB).index_fill(0, torch.tensor([1]), 399 * 200.0)
    pushes[0] = -pushes[1]
    torch.testing.assert_close(head.weight.grad, pushes[:, None].expand(-1, 4), rtol=1e-3, atol=1.0)


@pytest.mark.parametrize(
    "error", [None, TypeError, RuntimeError]
)  # before torch 2.9; in 2.9, and on ROCm
def test_products_are_added_in_full_precision_wherever_torch_can(monkeypatch, error):
    """Stands for devices that are not here; a CPU has no `out_dtype` at all."""
    addmm, taken = torch.addmm, []

    def of_device(total, left, right, *, out_dtype=None, out=None):
        if error is not None:
            raise error
        taken.append(left)
        return addmm(total, left.to(out_dtype), right.to(out_dtype), out=out)

    monkeypatch.setattr(torch, "addmm", of_device)
    total, left = torch.randn(3, 4), torch.randn(3, 5, dtype=torch.bfloat16)
    right = torch.randn(5, 4, dtype=torch.bfloat16)
    expected = total + left.float() @ right.float()
    torch.testing.assert_close(tiles._add_product_(total, left, right), expected)
    torch.testing.assert_close(total, expected)
    assert any(each is left for each in taken) == (error is None)
