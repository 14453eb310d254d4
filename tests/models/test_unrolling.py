"""The statements that make attention a step of descent, in float64 over many draws, each with its counterexample."""

import math

import pytest
import torch

from hf_descent.models.unrolling import symmetric_attention


def similarity(points):
    """W_ij = exp(-||z_i - z_j||^2 / 2), written out."""
    return torch.tensor(
        [[math.exp(-float((a - b).square().sum()) / 2) for b in points] for a in points]
    ).double()


def draws(count=300):
    """Tokens and projections, from "all tokens alike" to "no two alike", and far from invertible."""
    generator = torch.Generator().manual_seed(0)
    for draw in range(count):
        seq, width = 2 + draw % 7, 1 + draw % 5
        tokens = torch.randn(seq, width, generator=generator, dtype=torch.float64) * 10 ** (
            -1 + draw % 3 / 1.5
        )
        yield tokens, torch.randn(width, 1 + draw % 4, generator=generator, dtype=torch.float64)


def attend(tokens, **weights):
    return symmetric_attention(tokens[None], tokens[None], **weights)[0]


@pytest.mark.parametrize("self_weight", [0, 0.7])
def test_attention_is_the_stated_formula(self_weight):
    torch.manual_seed(0)
    tokens, projection = torch.rand(6, 3).double(), torch.randn(3, 4).double()
    weights = similarity(tokens @ projection)
    sums = [
        sum(weights[i, j] * tokens[j] for j in range(6)) + self_weight * tokens[i] for i in range(6)
    ]
    expected = torch.stack([sums[i] / (weights[i].sum() + self_weight) for i in range(6)])
    found = symmetric_attention((tokens @ projection)[None], tokens[None], self_weight=self_weight)[
        0
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weights", [{}, {"self_weight": 0.7}])
def test_attention_leaves_masked_keys_out(weights):
    torch.manual_seed(0)
    tokens = torch.randn(2, 6, 3)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    output = symmetric_attention(tokens, tokens, mask, **weights)
    torch.testing.assert_close(output[0, :4], attend(tokens[0, :4], **weights))
    torch.testing.assert_close(output[1, 1:], attend(tokens[1, 1:], **weights))
    assert output.isfinite().all()


def test_attention_sees_differences_alone():
    torch.manual_seed(0)
    points, tokens = torch.randn(3, 6, 8), torch.eye(6).expand(3, 6, 6)
    expected = symmetric_attention(points.double(), tokens.double())
    far = symmetric_attention(points + 1000, tokens)
    torch.testing.assert_close(far, expected.float(), atol=2e-3, rtol=0)
    # A model's own range: what bfloat16 keeps of the points, it keeps of the weights.
    points = 3 + 0.3 * points.bfloat16()
    expected = symmetric_attention(points.double(), tokens.double())
    torch.testing.assert_close(
        symmetric_attention(points, tokens.bfloat16()).double(), expected, atol=0.01, rtol=0
    )


@pytest.mark.parametrize("step", [0.3, 1.0])
def test_attention_never_raises_its_energy(step):
    drops = []
    for tokens, projection in draws():
        attended = symmetric_attention((tokens @ projection)[None], tokens[None])[0]
        moved = torch.lerp(tokens, attended, step)
        before, after = (
            -similarity(tokens @ projection).sum(),
            -similarity(moved @ projection).sum(),
        )
        assert after <= before + 1e-9
        drops.append(float(before - after))
    assert max(drops) > 1.0  # the energies do move


@pytest.mark.parametrize("weight", [0.1, 1.0, 10.0])
def test_the_proximal_step_never_raises_its_energy(weight):
    for tokens, _ in draws(100):
        moved = attend(tokens, self_weight=weight)
        anchored = -similarity(moved).sum() + weight * (moved - tokens).square().sum()
        assert anchored <= -similarity(tokens).sum() + 1e-9
