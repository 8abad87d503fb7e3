"""Acceptance under Triton's interpreter. `test_accept_kernel` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from selfspec_kernels import accept, accept_kernel, accept_ratio_kernel
from selfspec_kernels import accept_reference as reference
from selfspec_kernels.accept_kernel import accept_matching
from selfspec_kernels.accept_ratio_kernel import accept_ratio

# (sequences, drafted tokens, vocabulary)
SHAPES = [(1, 0, 1), (2, 1, 1), (3, 4, 97), (1, 2, 64), (2, 8, 65), (5, 3, 130), (1, 3, 1000)]
CASES = [(*shape, torch.float32) for shape in SHAPES] + [(3, 4, 97, torch.bfloat16), (3, 4, 97, torch.float16)]
NOTHING = float("-inf")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of several chunks, whose last is not full."""
    monkeypatch.setattr(accept_kernel, "CHUNK", 64)


@pytest.fixture(autouse=True)
def garbage_beside_results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every buffer that acceptance makes stands in a larger one, which must not be written."""
    buffers = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = torch.Size(shape).numel()
        buffers.append(torch.full((size + 512,), 77, dtype=dtype, device=device))
        return buffers[-1][256 : 256 + size].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    for buffer in buffers:
        assert (buffer[:256] == 77).all() and (buffer[-256:] == 77).all(), "written beside a result"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def amid_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that stands in a larger buffer, before and behind it NaN or, of tokens, one far outside."""
    garbage = float("nan") if tensor.dtype.is_floating_point else 2**40
    buffer = torch.full((tensor.numel() + 512,), garbage, dtype=tensor.dtype)
    return buffer[256 : 256 + tensor.numel()].view(tensor.shape).copy_(tensor)


def probabilities(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Peaked ones, about a third of them zero, as top-k and top-p leave them."""
    logits = 3 * torch.randn(*shape, generator=generator(seed))
    hidden = torch.rand(*shape, generator=generator(seed + 100)) < 0.3
    hidden[..., seed % shape[-1]] = False
    return logits.masked_fill(hidden, NOTHING).softmax(-1).to(dtype)


def near(chosen: torch.Tensor, width: int) -> torch.Tensor:
    """Return drafted tokens [B, k] of which most are the target's `chosen` [B, k + 1]."""
    wrong = torch.rand(chosen[:, :-1].shape, generator=generator(5)) < 0.2
    return torch.where(wrong, (chosen[:, :-1] + 1) % width, chosen[:, :-1])


def drawn(q: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Draw tokens [B, k] from q [B, k, V]."""
    return reference.draw(q.float(), torch.rand(q.shape[:-1], generator=generator(seed)))


def uniforms(batch: int, k: int, seed: int = 2) -> torch.Tensor:
    return torch.rand(batch, k + 1, generator=generator(seed), dtype=torch.float64)


def assert_same(ours: tuple[Any, ...], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert ours[0].dtype == ours[1].dtype == torch.int64
    assert ours[0].tolist() == wanted[0].tolist() and ours[1].tolist() == wanted[1].tolist()


def assert_ratio_as_the_reference(
    drafted: torch.Tensor, q: torch.Tensor | None, p: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    garbage = None if q is None else amid_garbage(q)
    ours = accept_ratio(amid_garbage(drafted), garbage, amid_garbage(p), amid_garbage(noise), None)
    assert_same(ours, reference.accept_ratio(drafted, None if q is None else q.float(), p.float(), noise))
    return ours[0], ours[1]


class TestMatching:
    @pytest.mark.parametrize("batch, k, width, dtype", CASES)
    def test_greedy_of_odd_shapes(self, batch, k, width, dtype):
        logits = torch.randn(batch, k + 1, width, generator=generator(0)).to(dtype)
        drafted = near(logits.argmax(-1), width)
        ours = accept_matching(amid_garbage(drafted), amid_garbage(logits), None, None)
        assert_same(ours, reference.accept_greedy(drafted, logits))

    def test_many_sequences(self):
        logits = torch.randn(25, 5, 70, generator=generator(0))
        drafted = near(logits.argmax(-1), 70)
        accepted, following, _ = accept_matching(drafted, logits, None, None)
        assert_same((accepted, following), reference.accept_greedy(drafted, logits))
        assert {0, 1, 2, 4} <= set(accepted.tolist())

    def test_a_token_that_agrees_after_one_that_does_not_is_not_accepted(self):
        logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 4]]), 70).float()
        accepted, following, _ = accept_matching(torch.tensor([[1, 9, 3]]), logits, None, None)
        assert (accepted.tolist(), following.tolist()) == ([1], [2])

    def test_the_first_of_equals_is_chosen_within_and_across_chunks(self):
        logits = torch.randint(0, 3, (6, 4, 300), generator=generator(0)).float()
        logits[0, 0] = 1.0
        logits[1, 0] = torch.where(torch.arange(300) < 140, 0.0, 2.0)
        wanted = reference.accept_greedy(near(logits.argmax(-1), 300), logits)
        assert_same(accept_matching(near(logits.argmax(-1), 300), logits, None, None), wanted)
        nothing = torch.zeros(2, 0, dtype=torch.long)
        assert accept_matching(nothing, logits[:2, :1], None, None)[1].tolist() == [0, 140]

    def test_masked_and_saturated_rows(self):
        logits = torch.randn(6, 1, 200, generator=generator(0))
        logits[0] = NOTHING
        logits[1, :, :150] = NOTHING  # whole first chunks
        logits[2, :, 64:] = NOTHING
        logits[3] = -3e38
        logits[4, :, 70] = float("inf")
        logits[5] = 3e38
        nothing = torch.zeros(6, 0, dtype=torch.long)
        ours = accept_matching(nothing, amid_garbage(logits), None, None)
        assert_same(ours, reference.accept_greedy(nothing, logits))

    def test_a_row_of_nan_gives_a_token_of_the_vocabulary_and_spoils_no_other(self):
        logits = torch.randn(3, 2, 130, generator=generator(0))
        drafted = logits.argmax(-1)[:, :1]
        wanted = accept_matching(drafted, logits, None, None)
        logits[1] = float("nan")
        accepted, following, _ = accept_matching(drafted, logits, None, None)
        assert (following >= 0).all() and (following < 130).all()
        assert torch.equal(accepted[[0, 2]], wanted[0][[0, 2]]) and torch.equal(following[[0, 2]], wanted[1][[0, 2]])

    @pytest.mark.parametrize("noise_dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("batch, k, width", SHAPES)
    def test_shared_noise_of_odd_shapes(self, batch, k, width, noise_dtype):
        p = probabilities(batch, k + 1, width)
        gumbel = -(-torch.rand(p.shape, generator=generator(1), dtype=torch.float64).log()).log()
        gumbel = gumbel.to(noise_dtype)
        drafted = near(reference.draw_with_gumbel(p, gumbel), width)
        ours = accept_matching(amid_garbage(drafted), amid_garbage(p), amid_garbage(gumbel), None)
        assert_same(ours, reference.accept_shared(drafted, p, gumbel))

    def test_noise_decides_among_equals_to_its_last_digit_and_raises_no_impossible_token(self):
        p, gumbel = torch.full((2, 1, 200), 1 / 128), torch.zeros(2, 1, 200, dtype=torch.float64)
        gumbel[0, 0, 150] = 1e-13
        p[1, 0, :190], gumbel[1, 0, :190] = 0.0, 900.0
        nothing = torch.zeros(2, 0, dtype=torch.long)
        assert accept_matching(nothing, p, gumbel, None)[1].tolist() == [150, 190]


class TestRatio:
    @pytest.mark.parametrize("certain", [False, True])
    @pytest.mark.parametrize("batch, k, width, dtype", CASES)
    def test_of_odd_shapes(self, batch, k, width, dtype, certain):
        p, q = probabilities(batch, k + 1, width, dtype=dtype), probabilities(batch, k, width, seed=1, dtype=dtype)
        assert_ratio_as_the_reference(drawn(q), None if certain else q, p, uniforms(batch, k))

    @pytest.mark.parametrize("certain", [False, True])
    def test_many_sequences_with_a_draft_like_the_target(self, certain):
        p = probabilities(30, 5, 130, seed=7)
        q = 0.7 * p[:, :-1] + 0.3 * probabilities(30, 4, 130, seed=8)
        drafted = drawn(q) if not certain else p[:, :-1].argmax(-1)
        accepted, _ = assert_ratio_as_the_reference(drafted, None if certain else q, p, uniforms(30, 4))
        assert set(accepted.tolist()) == {0, 1, 2, 3, 4}

    def test_uniform_numbers_exactly_at_the_edges(self):
        """Sums of multiples of 2^-10 are exact in any order, so a token ends exactly where the next begins."""
        weights = torch.tensor([0, 3, 0, 5, 120, 0, 0, 384, 512 - 384, 512 - 128, 0, 0]) / 1024
        p = torch.zeros(200)
        p[torch.tensor([0, 1, 2, 63, 64, 65, 127, 128, 129, 190, 191, 199])] = weights
        edges = torch.cat((torch.zeros(1), weights.cumsum(0)[:-1])).double()
        noise = torch.cat((edges, edges[1:] - 2.0**-40, torch.tensor([1 - 2.0**-53, 1.0], dtype=torch.float64)))
        noise = noise[noise >= 0]
        rows = p.expand(len(noise), 1, 200)
        nothing = torch.zeros(len(noise), 0, dtype=torch.long)
        _, tokens = assert_ratio_as_the_reference(nothing, None, rows, noise[:, None])
        assert (p[tokens] > 0).all() and tokens.unique().tolist() == p.nonzero()[:, 0].tolist()

    def test_a_test_exactly_at_its_edge_rejects(self):
        p, q = torch.zeros(2, 2, 70), torch.zeros(2, 1, 70)
        p[:, :, 3], p[:, :, 66], q[:, :, 3], q[:, :, 5] = 0.25, 0.75, 0.5, 0.5
        noise = torch.tensor([[0.5, 0.1], [0.5 - 2.0**-50, 0.1]], dtype=torch.float64)
        accepted, following = assert_ratio_as_the_reference(torch.tensor([[3], [3]]), q, p, noise)
        assert (accepted.tolist(), following.tolist()) == ([0, 1], [66, 3])

    def test_saturated_distributions(self):
        one, other = (torch.nn.functional.one_hot(torch.tensor(token), 200).float() for token in (5, 150))
        p = torch.stack((one, other, one)).expand(2, 3, 200)
        q = torch.stack((torch.stack((one, other)), torch.stack((one, one))))
        drafted = torch.tensor([[5, 150], [5, 5]])
        accepted, following = assert_ratio_as_the_reference(drafted, q, p, torch.full((2, 3), 1 - 2.0**-24))
        assert (accepted.tolist(), following.tolist()) == ([2, 1], [5, 150])
        assert_ratio_as_the_reference(drafted, None, p, torch.full((2, 3), 1 - 2.0**-24))

    def test_where_no_residual_is_left_p_is_drawn_from(self):
        """q is nowhere below p, as rounding can make it; then where p is but one token, of the others no more."""
        p = probabilities(16, 2, 130, seed=3)
        q = (2 * p[:, :1]).contiguous()
        accepted, _ = assert_ratio_as_the_reference(drawn(q), q, p, uniforms(16, 1))
        assert 0 < accepted.sum() < 16
        p = torch.zeros(1, 2, 200)
        p[..., 130] = 1.0
        found = assert_ratio_as_the_reference(torch.tensor([[130]]), 2 * p[:, :1], p, torch.tensor([[0.9, 0.3]]))
        assert [result.tolist() for result in found] == [[0], [130]]

    def test_of_a_masked_vocabulary_only_tokens_that_are_left_are_drawn(self):
        p, q = probabilities(16, 3, 300, seed=3), probabilities(16, 2, 300, seed=4)
        p[:8, :, 100:], p[8:, :, :200] = 0.0, 0.0
        q[:, :, :64] = 0.0
        _, following = assert_ratio_as_the_reference(drawn(q), q, p, uniforms(16, 2))
        assert (following[:8] < 100).all() and (following[8:] >= 200).all()

    def test_without_any_weight_or_with_nan_the_token_is_one_of_the_vocabulary(self):
        p = probabilities(4, 2, 130)
        drafted, noise = p.argmax(-1)[:, :1], uniforms(4, 1)
        wanted = accept_ratio(drafted, None, p, noise, None)
        p[1], p[2] = 0.0, float("nan")
        accepted, following, _ = accept_ratio(drafted, None, p, noise, None)
        assert (following >= 0).all() and (following < 130).all()
        assert torch.equal(accepted[[0, 3]], wanted[0][[0, 3]]) and torch.equal(following[[0, 3]], wanted[1][[0, 3]])

    def test_a_sequence_alone_gives_what_it_gives_in_a_batch(self):
        p, q, noise = probabilities(7, 4, 150), probabilities(7, 3, 150, seed=1), uniforms(7, 3)
        drafted = drawn(q)
        together = accept_ratio(drafted, q, p, noise, None)
        for row in range(7):
            rows = slice(row, row + 1)
            alone = accept_ratio(drafted[rows], q[rows], p[rows], noise[rows], None)
            assert (int(alone[0]), int(alone[1])) == (int(together[0][row]), int(together[1][row]))


@pytest.mark.parametrize("which", ["matching", "ratio"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_only_active_sequences_commit(which, dtype):
    p = probabilities(6, 4, 100)
    drafted = near(p.argmax(-1), 100)
    commit = (torch.arange(6, dtype=dtype) * 10, torch.tensor([True, False, True, True, False, True]))
    before = commit[0].clone()
    if which == "matching":
        accepted, _, committed = accept_matching(drafted, p, None, commit)
    else:
        accepted, _, committed = accept_ratio(drafted, None, p, uniforms(6, 3), commit)
    assert committed is not None and committed.dtype == dtype and torch.equal(commit[0], before)
    wanted = reference.committed_after(accepted, *commit)
    assert torch.equal(committed, wanted) and committed[1] == 10 and committed[4] == 40
    assert accepted.unique().numel() > 1


def test_a_vocabulary_of_128256_tokens(monkeypatch):
    monkeypatch.setattr(accept_kernel, "CHUNK", 1024)
    p, q = probabilities(1, 2, 128256), probabilities(1, 1, 128256, seed=1)
    assert_ratio_as_the_reference(drawn(q), q, p, uniforms(1, 1))
    p[0, 0, 128255] = 1.0
    drafted = torch.tensor([[128255]])
    assert_same(accept_matching(drafted, p, None, None), reference.accept_greedy(drafted, p))


class TestTheOpsAreTheseOnAGpu:
    """On CPU tensors, told that they are a GPU's."""

    @pytest.fixture(autouse=True)
    def told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        monkeypatch.setattr(accept, "on_gpu", lambda tensor: True)
        for module, name in ((accept_kernel, "accept_matching"), (accept_ratio_kernel, "accept_ratio")):
            genuine = getattr(module, name)
            spy = lambda *rest, name=name, genuine=genuine: self.ran.append(name) or genuine(*rest)  # noqa: E731
            monkeypatch.setattr(module, name, spy)

    def test_acceptance(self):
        p, q, noise = probabilities(4, 3, 150), probabilities(4, 2, 150, seed=1), uniforms(4, 2)
        drafted, gumbel = near(p.argmax(-1), 150), torch.randn(4, 3, 150, dtype=torch.float64)
        commit = torch.tensor([5, 6, 7, 8]), torch.tensor([True, True, False, True])
        for ours, wanted in (
            (accept.accept_greedy(drafted, p, commit=commit), reference.accept_greedy(drafted, p)),
            (accept.accept_shared(drafted, p, gumbel, commit=commit), reference.accept_shared(drafted, p, gumbel)),
            (accept.accept_ratio(drafted, q, p, noise, commit=commit), reference.accept_ratio(drafted, q, p, noise)),
        ):
            assert_same(ours, wanted)
            assert torch.equal(ours.committed, reference.committed_after(wanted[0], *commit))
        assert self.ran == ["accept_matching", "accept_matching", "accept_ratio"]
        assert accept.accept_greedy(drafted, p).committed is None

    @pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
    def test_draws_of_any_number_of_rows(self, shape):
        p, noise = probabilities(*shape, 150), torch.rand(shape, generator=generator(1), dtype=torch.float64)
        gumbel = torch.randn(*shape, 150, generator=generator(2), dtype=torch.float64)
        assert accept.draw(p, noise).tolist() == reference.draw(p, noise).tolist()
        assert accept.draw_with_gumbel(p, gumbel).tolist() == reference.draw_with_gumbel(p, gumbel).tolist()
        one = p if not shape else p[0]
        expanded = one.expand(*gumbel.shape)
        assert accept.draw_with_gumbel(expanded, gumbel).shape == gumbel.shape[:-1]
        assert self.ran == ["accept_ratio", "accept_matching", "accept_matching"]


def test_what_does_not_go_together():
    p, drafted = probabilities(2, 3, 20), torch.zeros(2, 2, dtype=torch.long)
    noise = uniforms(2, 2)
    for bad in (
        lambda: accept_matching(drafted, p.double(), None, None),
        lambda: accept_matching(drafted, p[:, :2], None, None),
        lambda: accept_matching(drafted[:1], p, None, None),
        lambda: accept_matching(drafted, p, p[:, :2], None),
        lambda: accept_matching(drafted, p, None, (drafted[:, 0], drafted[:1, 0] > 0)),
        lambda: accept_ratio(drafted, p, p, noise, None),
        lambda: accept_ratio(drafted, p[:, :2].double(), p, noise, None),
        lambda: accept_ratio(drafted, None, p, noise[:, :2], None),
    ):
        with pytest.raises(ValueError):
            bad()
