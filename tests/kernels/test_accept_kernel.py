"""Acceptance without a GPU: under Triton's interpreter, and compiled for the cards it is meant for.

What compilation shows, and what not, stands in `cards`. What acceptance must do is tested in `decode/test_accept`,
against the reference that the kernels are held against here.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cards import CARDS, POINTERS, assert_fits, assert_passes_under_the_interpreter, compile_for
from selfspec_kernels import accept_greedy, accept_ratio, accept_shared
from selfspec_kernels import accept_reference as reference

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
# Of Llama 3 and of Gemma 3.
WIDTHS = [128256, 262144]
COMMIT = {"committed": "*i64", "active": "*i1", "new_committed": "*i64"}


@needs_triton
def test_results_under_the_interpreter() -> None:
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_accept.py"))


@needs_triton
@pytest.mark.parametrize("noise", [None, "*fp32", "*fp64"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("card", CARDS)
def test_matching_compiles_without_spills(card, width, noise, tmp_path, monkeypatch):
    from selfspec_kernels import accept_kernel as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    whole, merged = kernels.launch_constants(width, 16)
    scores = "*fp32" if noise is None else noise
    types = {"values": "*fp32", "gumbel": scores, "best": scores, "best_at": "*i32"}
    constants = {**whole, "GUMBEL": noise is not None}
    found = compile_for(card, kernels.best_of_chunk_kernel, types, constants, num_warps=kernels.NUM_WARPS)
    assert_fits(found, card, tmp_path)
    types = {"drafted": "*i64", "best": scores, "best_at": "*i32", "accepted": "*i64", "following": "*i64"}
    types |= {**COMMIT, "k": "i32"}
    constants = {**merged, "COMMIT": True}
    found = compile_for(card, kernels.accept_matching_kernel, types, constants, num_warps=kernels.NUM_WARPS)
    assert_fits(found, card, tmp_path)


@needs_triton
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("card", CARDS)
def test_the_ratio_test_compiles_without_spills(card, width, dtype, draft, tmp_path, monkeypatch):
    from selfspec_kernels import accept_ratio_kernel as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    whole, merged = kernels.launch_constants(width, 16)
    lanes = merged.pop("LANES")
    both = {"drafted": "*i64", "draft": POINTERS[dtype], "target": POINTERS[dtype], "uniforms": "*fp64"}
    types = {**both, "accepted": "*i64", "masses": "*fp64", "k": "i32"}
    constants = {**whole, "DRAFT": draft, "LANES": lanes}
    found = compile_for(card, kernels.residual_of_chunk_kernel, types, constants, num_warps=kernels.NUM_WARPS)
    assert_fits(found, card, tmp_path)
    types = {**both, "masses": "*fp64", "accepted": "*i64", "following": "*i64", **COMMIT, "k": "i32"}
    constants = {**whole, "DRAFT": draft, **merged, "COMMIT": True}
    found = compile_for(card, kernels.draw_kernel, types, constants, num_warps=kernels.NUM_WARPS)
    assert_fits(found, card, tmp_path)


def test_a_draft_that_was_certain_is_a_distribution_of_one_token() -> None:
    """In the reference: q of None as q that is one at the drafted token, to the bit."""
    generator = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(200, 4, 11, generator=generator)).softmax(-1)
    drafted, uniforms = p[:, :-1].argmax(-1), torch.rand(200, 4, generator=generator, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(drafted, 11).float()
    ours, wanted = (accept_ratio(drafted, q, p, uniforms) for q in (None, one_hot))
    assert torch.equal(ours.accepted, wanted.accepted) and torch.equal(ours.following, wanted.following)
    assert set(ours.accepted.tolist()) == {0, 1, 2, 3}


def test_only_active_sequences_commit() -> None:
    logits, drafted = torch.randn(3, 2, 7), torch.zeros(3, 1, dtype=torch.long)
    commit = torch.tensor([5, 6, 7]), torch.tensor([True, False, True])
    uniforms = torch.full((3, 2), 0.5)
    for found in (
        accept_greedy(drafted, logits, commit=commit),
        accept_shared(drafted, logits.softmax(-1), torch.zeros(3, 2, 7), commit=commit),
        accept_ratio(drafted, None, logits.softmax(-1), uniforms, commit=commit),
    ):
        assert found.committed is not None
        assert found.committed.tolist() == [6 + int(found.accepted[0]), 6, 8 + int(found.accepted[2])]
        assert commit[0].tolist() == [5, 6, 7]
    assert accept_greedy(drafted, logits).committed is None


def test_the_greedy_reference_takes_the_first_of_equals() -> None:
    logits = torch.zeros(1, 2, 5)
    logits[0, 1, 2:4] = 1.0
    accepted, following = reference.accept_greedy(torch.tensor([[0]]), logits)
    assert (accepted.tolist(), following.tolist()) == ([1], [2])
