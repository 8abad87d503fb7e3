"""The fused loss against the formulas written out with whole logits and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec_tune.train.loss import agreement_counts, early_exit_loss

# fp32: sums over V = 50 in another order; 1e-5 relative is a few ulp of the largest entries.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
KINDS = ("kl", "ce", "tv", "mixture")
SIZE, VOCAB, ROWS = 8, 50, 23


@dataclass
class Example:
    """Inputs of a loss. Hidden states stand before the norm; the base's after its own."""

    hidden: list[Tensor]
    weight: Tensor
    targets: Tensor
    norm: nn.Module
    base: Tensor
    base_weight: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.hidden, self.weight, *self.norm.parameters()]

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients of 2.5 times the loss, zeros where there are none."""
        for each in self.tensors:
            each.grad = None
        (2.5 * loss).backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in self.tensors]


def example(num_exits: int, dtype: torch.dtype, shape: tuple[int, ...] = (ROWS,)) -> Example:
    torch.manual_seed(3)
    norm = nn.RMSNorm(SIZE, eps=1e-5, dtype=dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    return Example(
        [torch.randn(*shape, SIZE, dtype=dtype, requires_grad=True) for _ in range(1 + num_exits)],
        torch.randn(VOCAB, SIZE, dtype=dtype, requires_grad=True),
        torch.randint(0, VOCAB, shape),
        norm,
        torch.randn(*shape, SIZE, dtype=dtype),
        torch.randn(VOCAB, SIZE, dtype=dtype),
    )


def kl(p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (p.log() - log_q)).sum(-1).mean()


def unfused(
    given: Example,
    shares: Sequence[float],
    kind: str,
    mixture: Sequence[float] | None = None,
    anchor: float = 0.0,
    base_weight: Tensor | None = None,
) -> tuple[Tensor, list[float], list[float]]:
    """Return total, losses and agreements from whole logits, with every row counted."""
    logits = [given.norm(hidden) @ given.weight.t() for hidden in given.hidden]
    p = logits[0].detach().softmax(-1)
    cross_entropy = F.cross_entropy(logits[0], given.targets)
    base = (given.base @ (given.weight.detach() if base_weight is None else base_weight).t()).softmax(-1)
    drift = kl(base, logits[0].log_softmax(-1))
    own = [(1 - anchor) * cross_entropy + anchor * drift]
    agreed = [torch.minimum(p, base).sum(-1).mean().item() if anchor else 1.0]
    for index, exit_logits in enumerate(logits[1:]):
        overlap = torch.minimum(p, exit_logits.softmax(-1)).sum(-1).mean()
        losses = {
            "ce": F.cross_entropy(exit_logits, given.targets),
            "kl": kl(p, exit_logits.log_softmax(-1)),
            "tv": 1 - overlap,
        }
        if mixture is not None:
            losses["mixture"] = mixture[index] * losses["kl"] + (1 - mixture[index]) * losses["tv"]
        own.append(losses[kind])
        agreed.append(overlap.item())
    total = sum(share * loss for share, loss in zip(shares, own, strict=True))
    assert isinstance(total, Tensor)
    reported = [cross_entropy, *own[1:], *([drift] if anchor else [])]
    return total, [loss.item() for loss in reported], agreed


def assert_near(got: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("anchor", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_exits", "chunk"), [(0, 5), (1, 5), (3, 7), (3, 23), (2, 100), (2, 1)])
def test_losses_and_gradients_equal_the_unfused_ones(
    num_exits: int, chunk: int, kind: Any, anchor: float, dtype: torch.dtype
) -> None:
    given = example(num_exits, dtype)
    shares = [0.4, *[0.6 * depth / 6 for depth in (3, 2, 1)][:num_exits]]
    mixture = [0.9, 0.5, 0.0][:num_exits] if kind == "mixture" else None
    total, losses, agreed = early_exit_loss(
        given.hidden,
        given.weight,
        given.targets,
        shares=shares,
        kind=kind,
        mixture=mixture,
        norm=given.norm,
        teacher=given.base,
        anchor=anchor,
        chunk=chunk,
    )
    gradients = given.gradients(total)
    expected, expected_losses, expected_agreed = unfused(given, shares, kind, mixture, anchor)
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(total, expected, rtol=rtol, atol=0)
    assert losses.tolist() == pytest.approx(expected_losses, rel=rtol)
    assert agreed.tolist() == pytest.approx(expected_agreed, rel=rtol)
    assert not losses.requires_grad and not agreed.requires_grad
    assert_near(gradients, given.gradients(expected), rtol)


def test_without_a_norm_hidden_states_are_taken_as_they_are() -> None:
    given = example(2, torch.float64)
    shares = (0.5, 0.3, 0.2)
    total, _, _ = early_exit_loss(given.hidden, given.weight, given.targets, shares=shares, chunk=6)
    gradients = given.gradients(total)
    given.norm = nn.Identity()
    expected, _, _ = unfused(given, shares, "kl")
    assert_near(gradients[:-1], given.gradients(expected), 1e-12)


def test_hidden_states_that_are_not_contiguous_get_their_gradients() -> None:
    given = example(1, torch.float64, (3, 9))
    options: dict[str, Any] = {"shares": (0.5, 0.5), "norm": given.norm, "chunk": 5}
    expected = given.gradients(early_exit_loss(given.hidden, given.weight, given.targets, **options)[0])
    given.hidden = [
        each.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for each in given.hidden
    ]
    got = given.gradients(early_exit_loss(given.hidden, given.weight, given.targets, **options)[0])
    assert_near(got, expected, 0.0)


def test_the_base_may_have_a_head_of_its_own() -> None:
    given = example(1, torch.float64)
    total, losses, _ = early_exit_loss(
        given.hidden,
        given.weight,
        given.targets,
        shares=(0.5, 0.5),
        norm=given.norm,
        teacher=given.base,
        teacher_weight=given.base_weight,
        anchor=0.3,
        chunk=6,
    )
    gradients = given.gradients(total)
    expected, expected_losses, _ = unfused(given, (0.5, 0.5), "kl", None, 0.3, given.base_weight)
    assert losses.tolist() == pytest.approx(expected_losses, rel=1e-12)
    assert_near(gradients, given.gradients(expected), 1e-12)


def test_rows_without_a_target_count_for_nothing_and_keep_their_place() -> None:
    given = example(2, torch.float64, (3, 9))
    given.targets[0, 4:] = given.targets[2] = -100
    counted = given.targets != -100
    shares = (0.5, 0.3, 0.2)
    total, losses, agreed = early_exit_loss(
        given.hidden, given.weight, given.targets, shares=shares, norm=given.norm, chunk=5
    )
    gradients = given.gradients(total)
    kept = Example(
        [each.detach()[counted].requires_grad_() for each in given.hidden],
        given.weight,
        given.targets[counted],
        given.norm,
        given.base[counted],
        given.base_weight,
    )
    expected, expected_losses, expected_agreed = unfused(kept, shares, "kl")
    assert losses.tolist() == pytest.approx(expected_losses) and agreed.tolist() == pytest.approx(expected_agreed)
    *wanted, weight, scale = kept.gradients(expected)
    scattered = [torch.zeros_like(each) for each in given.hidden]
    for each, rows in zip(scattered, wanted, strict=True):
        each[counted] = rows
    assert_near(gradients, [*scattered, weight, scale], 1e-12)
    counts = agreement_counts(given.hidden, given.weight, given.targets, norm=given.norm, chunk=5)
    assert counts[0] == counted.sum() == 13
    assert (counts[1] / 13).item() == pytest.approx(expected_losses[0], rel=1e-6)


def test_the_exit_does_not_pull_the_final_layer_towards_itself() -> None:
    given = example(1, torch.float64)
    for kind in ("kl", "tv"):
        total, _, _ = early_exit_loss(given.hidden, given.weight, given.targets, shares=(0.0, 1.0), kind=kind, chunk=4)
        final, early, *_ = given.gradients(total)
        assert final.abs().max() == 0
        assert early.abs().max() > 0


def test_an_exit_equal_to_the_final_layer_has_no_loss_and_no_gradient() -> None:
    given = example(0, torch.float64)
    given.hidden.append(given.hidden[0].detach().clone().requires_grad_())
    for kind in ("kl", "tv"):
        total, losses, agreed = early_exit_loss(
            given.hidden, given.weight, given.targets, shares=(0.0, 1.0), kind=kind, chunk=6
        )
        assert losses[1].abs() < 1e-15 and abs(agreed[1] - 1) < 1e-15
        assert all(gradient.abs().max() < 1e-15 for gradient in given.gradients(total))


def test_a_frozen_head_or_norm_takes_no_gradient_and_changes_no_other() -> None:
    given = example(2, torch.float64)
    options: dict[str, Any] = {"shares": (0.5, 0.25, 0.25), "norm": given.norm, "chunk": 6}
    *hidden, _, _ = given.gradients(early_exit_loss(given.hidden, given.weight, given.targets, **options)[0])
    frozen = given.weight.detach()
    *same, none, scale = given.gradients(early_exit_loss(given.hidden, frozen, given.targets, **options)[0])
    assert_near(same, hidden, 0.0)
    assert given.weight.grad is None and none.abs().max() == 0 and scale.abs().max() > 0
    given.norm.requires_grad_(False)
    *same, _, _ = given.gradients(early_exit_loss(given.hidden, given.weight, given.targets, **options)[0])
    assert_near(same, hidden, 0.0)
    assert given.norm.weight.grad is None
    # Only the head is trained: hidden states of a frozen model have no graph.
    detached = [each.detach() for each in given.hidden]
    early_exit_loss(detached, given.weight, given.targets, **options)[0].backward()


def test_no_token_to_predict_gives_zero_not_nan() -> None:
    given = example(2, torch.float32)
    nothing = torch.full_like(given.targets, -100)
    total, losses, _ = early_exit_loss(given.hidden, given.weight, nothing, shares=(0.5, 0.3, 0.2), norm=given.norm)
    assert total == 0 and losses.tolist() == [0, 0, 0]
    assert all(gradient.abs().max() == 0 for gradient in given.gradients(total))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_autocast_stays_near_fp32(kind: Any) -> None:
    given = example(2, torch.float32)
    options: dict[str, Any] = {"shares": (0.5, 0.3, 0.2), "kind": kind, "norm": given.norm, "chunk": 9}
    options["mixture"] = (0.3, 0.7)
    expected, _, _ = early_exit_loss(given.hidden, given.weight, given.targets, **options)
    wanted = given.gradients(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _, _ = early_exit_loss(given.hidden, given.weight, given.targets, **options)
    # bf16 keeps 8 bits of each logit: about 0.4 % of it, and the gradient of tv jumps where q passes p.
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    assert total != expected
    assert_near(given.gradients(total), wanted, 0.05)


def test_bf16_weights_collect_their_gradient_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of the vocabulary, so that no second [V, d] is made for the products."""
    monkeypatch.setattr("selfspec_tune.train.fused_loss.LOGITS_PER_CHUNK", 16 * SIZE)
    given = example(1, torch.float32, (400,))
    expected = given.gradients(unfused(given, (0.5, 0.5), "kl")[0])[-2]
    small = given.weight.detach().bfloat16().requires_grad_()
    early_exit_loss(given.hidden, small, given.targets, shares=(0.5, 0.5), norm=given.norm, chunk=1)[0].backward()
    assert small.grad is not None and small.grad.dtype == torch.bfloat16
    # 400 chunks added up in bf16 would lose what is below 1/256 of the sum.
    error = (small.grad * 2.5 - expected).norm() / expected.norm()
    assert error < 0.01


def test_gradients_are_handed_over_not_copied_and_once() -> None:
    given = example(1, torch.float64)
    total, _, _ = early_exit_loss(given.hidden, given.weight, given.targets, shares=(0.5, 0.5))
    kept = [each.data_ptr() for each in total.grad_fn.gradients if each is not None]  # type: ignore[union-attr]
    total.backward(retain_graph=True)
    assert [each.grad.data_ptr() for each in (given.weight, *given.hidden) if each.grad is not None] == kept
    with pytest.raises(RuntimeError, match="taken before"):
        total.backward()


@pytest.mark.parametrize(
    "options",
    [
        {"shares": (1.0,)},
        {"shares": (0.5, 0.5), "kind": "mixture"},
        {"shares": (0.5, 0.5), "kind": "mixture", "mixture": (0.1, 0.2)},
        {"shares": (0.5, 0.5), "anchor": 0.1},
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    given = example(1, torch.float32)
    with pytest.raises(ValueError):
        early_exit_loss(given.hidden, given.weight, given.targets, **options)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_alpha_counts_agreement_with_the_final_layer_not_with_the_data(chunk: int) -> None:
    # A head that is the identity: the argmax is the largest coordinate.
    final = F.one_hot(torch.tensor([0, 1, 2, 3]), 5).float()
    agrees_twice = F.one_hot(torch.tensor([0, 1, 4, 4]), 5).float()
    never = F.one_hot(torch.tensor([4, 4, 4, 4]), 5).float()
    targets = torch.tensor([4, 4, 4, 4])  # the data agree with `never` everywhere
    counts = agreement_counts([final, agrees_twice, never], torch.eye(5), targets, chunk=chunk)
    expected = F.cross_entropy(final, targets, reduction="sum").item()
    assert counts.tolist() == pytest.approx([4, expected, 2, 0])
