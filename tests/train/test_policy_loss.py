"""The formulas of the loss, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from strands_rollout.train.policy import clipped_policy_loss, k3_divergence, truncated_weights  # noqa: E402


def test_a_ratio_beyond_its_bound_earns_no_more_and_is_counted() -> None:
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]), torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0])
    losses, clipped = clipped_policy_loss(ratios.log(), advantages, 0.2, 0.28)
    assert torch.allclose(losses, torch.tensor([-2.56, 3.0, -1.0, 1.6, -3.0]))
    assert clipped.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_a_clipped_token_has_no_gradient_and_another_has_its_advantage() -> None:
    log_ratio = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    clipped_policy_loss(log_ratio, torch.tensor([2.0, 2.0]), 0.2, 0.28)[0].sum().backward()
    assert log_ratio.grad.tolist() == [0.0, -2.0]


def test_importance_weights_stop_at_their_bound() -> None:
    weights = truncated_weights(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -3.0, -1.0]), 2.0)
    assert torch.allclose(weights, torch.tensor([1.0, 2.0, math.exp(-2)]))


def test_the_k3_estimate_is_the_divergence_in_the_mean_and_never_negative() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    estimates = k3_divergence(policy.log(), reference.log())
    assert (estimates >= 0).all()
    exact = (policy * (policy / reference).log()).sum()
    assert torch.allclose((policy * estimates).sum(), exact)
    assert k3_divergence(torch.tensor([-30.0]), torch.tensor([0.0])).item() == 10.0
