"""The fused loss against the formula written out with whole logits and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from selfspec_tune.train.loss import agreement_counts, early_exit_loss

# fp32: sums over V = 50 in another order; 1e-5 relative is a few ulp of the largest entries.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, exit_weight: float, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.t()
    losses = [F.cross_entropy(logits[0], targets)]
    for exit_logits in logits[1:]:
        if kind == "ce":
            losses.append(F.cross_entropy(exit_logits, targets))
        else:
            p = logits[0].detach().softmax(-1)
            losses.append((p * (p.log() - exit_logits.log_softmax(-1))).sum(-1).mean())
    total = losses[0]
    if len(losses) > 1:
        total = (1 - exit_weight) * losses[0] + exit_weight * torch.stack(losses[1:]).mean()
    return total, torch.stack(losses).detach()


def example(num_exits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(1 + num_exits, 23, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 8, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, 50, (23,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize(("num_exits", "chunk"), [(0, 5), (1, 5), (3, 7), (3, 23), (2, 100), (2, 1)])
def test_losses_and_gradients_equal_the_unfused_ones(num_exits: int, chunk: int, kind: str, dtype: torch.dtype) -> None:
    hidden, weight, targets = example(num_exits, dtype)
    total, losses = early_exit_loss(hidden, weight, targets, exit_weight=0.3, kind=kind, chunk=chunk)
    (total * 2.5).backward()
    fused = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    expected_total, expected_losses = naive(hidden, weight, targets, 0.3, kind)
    (expected_total * 2.5).backward()
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(total, expected_total, rtol=rtol, atol=0)
    torch.testing.assert_close(losses, expected_losses, rtol=rtol, atol=0)
    for got, expected in zip(fused, (hidden.grad, weight.grad), strict=True):
        assert got is not None and expected is not None
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def test_the_exit_does_not_pull_the_final_layer_towards_itself() -> None:
    hidden, weight, targets = example(1, torch.float64)
    total, _ = early_exit_loss(hidden, weight, targets, exit_weight=1.0, kind="kl", chunk=4)
    total.backward()
    assert hidden.grad is not None
    assert hidden.grad[0].abs().max() == 0
    assert hidden.grad[1].abs().max() > 0


def test_an_exit_equal_to_the_final_layer_has_no_kl() -> None:
    hidden, weight, targets = example(0, torch.float64)
    _, losses = early_exit_loss(torch.cat([hidden, hidden]), weight, targets, exit_weight=0.5, chunk=6)
    assert losses[1].abs() < 1e-15


def test_a_frozen_head_takes_no_gradient_and_changes_no_other() -> None:
    hidden, weight, targets = example(2, torch.float64)
    early_exit_loss(hidden, weight, targets, exit_weight=0.5, chunk=6)[0].backward()
    expected, hidden.grad = hidden.grad, None
    early_exit_loss(hidden, weight.detach(), targets, exit_weight=0.5, chunk=6)[0].backward()
    assert hidden.grad is not None and expected is not None
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=0)


def test_no_token_to_predict_gives_zero_not_nan() -> None:
    hidden, weight, _ = example(2, torch.float32)
    empty = hidden[:, :0].detach().requires_grad_()
    total, losses = early_exit_loss(empty, weight, torch.zeros(0, dtype=torch.long), exit_weight=0.5)
    total.backward()
    assert total == 0 and losses.tolist() == [0, 0, 0]
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_bf16_autocast_stays_near_fp32() -> None:
    hidden, weight, targets = example(2, torch.float32)
    expected, _ = early_exit_loss(hidden, weight, targets, exit_weight=0.5, chunk=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = early_exit_loss(hidden, weight, targets, exit_weight=0.5, chunk=9)
    total.backward()
    # bf16 keeps 8 bits of each logit: about 0.4 % of it.
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    assert total != expected
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_alpha_counts_agreement_with_the_final_layer_not_with_the_data(chunk: int) -> None:
    # A head that is the identity: the argmax is the largest coordinate.
    final = F.one_hot(torch.tensor([0, 1, 2, 3]), 5).float()
    agrees_twice = F.one_hot(torch.tensor([0, 1, 4, 4]), 5).float()
    never = F.one_hot(torch.tensor([4, 4, 4, 4]), 5).float()
    targets = torch.tensor([4, 4, 4, 4])  # the data agree with `never` everywhere
    counts = agreement_counts(torch.stack([final, agrees_twice, never]), torch.eye(5), targets, chunk=chunk)
    expected = F.cross_entropy(final, targets, reduction="sum").item()
    assert counts.tolist() == pytest.approx([4, expected, 2, 0])
