"""Drafts from some rows of the LM head: they propose nothing else, and the text is the target's all the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from selfspec_kernels import PackedWeight
from tiny import END, VOCAB, tiny_model

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import DecodeConfig
from selfspec_tune.decode.drafters import Draft, Drafter
from selfspec_tune.decode.drafters.draft_head import DraftHead, read_vocab
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter, estimate_bytes
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.plan import choose, make_plan
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.draft_vocab import FILE_NAME, TokenCounts, write_draft_vocab
from selfspec_tune.model.exit_head import ExitHead
from selfspec_tune.model.load import load_tokenizer

GREEDY = SamplingParams()
REQUESTS = [Request(str(n), prompt, 60) for n, prompt in enumerate(([*range(20, 60)], [7, 8, 9]))]
DRAFTERS: dict[str, Callable[[LayeredDecoder, torch.Tensor | None], Any]] = {
    "layer-skip": lambda decoder, vocab: LayerSkipDrafter(decoder, 3, vocab),
    "exit-head": lambda decoder, vocab: ExitHeadDrafter(decoder, ExitHead(decoder.model, 3, decoder.dtype), vocab),
    "4 bits": lambda decoder, vocab: LowPrecisionDrafter(decoder, 4, vocab=vocab),
    "8 bits, head in 4": lambda decoder, vocab: LowPrecisionDrafter(decoder, 8, 4, 3, vocab=vocab),
}
# Between two shapes of one product, in fp32.
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def engine_for(dtype: torch.dtype = torch.float32, batch_size: int = 2) -> Engine:
    return Engine(LayeredDecoder(tiny_model(late=0.3).to(dtype)), batch_size=batch_size, keep_logits=True)


def frequent(completions: list[Completion], share: float = 0.5) -> torch.Tensor:
    """The most frequent tokens of some texts, about that share of the different ones, and the end token: rising ids."""
    counts = Counter(token for completion in completions for token in completion.token_ids)
    kept = [token for token, _ in counts.most_common(round(share * len(counts)))]
    assert len(kept) < len(counts), "the texts must hold tokens that are not drafted"
    return torch.tensor(sorted({*kept, END}))


def recorded(drafter: Drafter) -> list[Draft]:
    """Keep every draft that a drafter proposes from here on."""
    drafts: list[Draft] = []
    genuine = drafter.propose

    def propose(*arguments: Any) -> Draft:
        drafts.append(genuine(*arguments))
        return drafts[-1]

    drafter.propose = propose  # type: ignore[method-assign]
    return drafts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_plain_decodings_to_the_bit(name: str, dtype: torch.dtype) -> None:
    engine = engine_for(dtype)
    plain, _ = engine.generate(REQUESTS, GREEDY)
    vocab = frequent(plain)
    drafter = DRAFTERS[name](engine.decoder, vocab)
    drafts = recorded(drafter)
    for k in (1, 4):
        completions, stats = engine.generate(REQUESTS, GREEDY, drafter, DraftPolicy(k))
        assert stats.accepted > 0
        for one, other in zip(plain, completions, strict=True):
            assert one.token_ids == other.token_ids
            assert all(torch.equal(p, q) for p, q in zip(one.logits, other.logits, strict=True))
    assert torch.isin(torch.cat([draft.tokens.flatten() for draft in drafts]), vocab).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=1),
        SamplingParams(0.8, top_k=200, seed=1),
        SamplingParams(0.8, top_k=5, seed=1),
        SamplingParams(1.5, top_p=0.9, seed=1),
        SamplingParams(1e-38, seed=1),
    ],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_q_is_zero_outside_and_nothing_outside_is_drafted(name: str, params: SamplingParams) -> None:
    engine, vocab = engine_for(), torch.tensor([3, 10, 17, 80, 81, 200, END])
    drafter = DRAFTERS[name](engine.decoder, vocab)
    drafts = recorded(drafter)
    completions, _ = engine.generate(REQUESTS, params, drafter, DraftPolicy(3))
    assert any(token not in vocab for completion in completions for token in completion.token_ids)
    outside = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, vocab, False)
    for draft in drafts:
        assert draft.probabilities is not None
        assert (draft.probabilities[..., outside] == 0).all() and torch.isin(draft.tokens, vocab).all()
        torch.testing.assert_close(draft.probabilities.sum(-1), torch.ones(draft.tokens.shape))


@pytest.mark.parametrize("name", DRAFTERS)
def test_shared_noise_samples_the_same_text_with_and_without(name: str) -> None:
    engine = engine_for()
    params = SamplingParams(0.9, top_k=40, top_p=0.95, seed=3, reproducible=True)
    plain, _ = engine.generate(REQUESTS, params)
    drafter = DRAFTERS[name](engine.decoder, frequent(plain))
    drafts = recorded(drafter)
    completions, stats = engine.generate(REQUESTS, params, drafter, DraftPolicy(3))
    assert [c.token_ids for c in plain] == [c.token_ids for c in completions] and stats.accepted > 0
    assert torch.isin(torch.cat([draft.tokens.flatten() for draft in drafts]), frequent(plain)).all()


@pytest.mark.usefixtures("both_ops")
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_the_whole_heads_where_there_are_any(with_bias: bool) -> None:
    decoder = LayeredDecoder(tiny_model())
    if with_bias:
        decoder.head = (decoder.head[0], torch.randn(VOCAB))
    vocab = torch.tensor([0, 5, 6, 199, VOCAB - 1])
    hidden = torch.randn(2, 1, decoder.family.hidden_size)
    head = DraftHead(decoder, vocab)
    found, whole = head(hidden, decoder.final_norm), decoder.logits(hidden)
    assert found.shape == whole.shape and found.dtype == torch.float32
    torch.testing.assert_close(found[..., vocab], whole[..., vocab], **TOLERANCE)
    assert found.isneginf().sum() == 2 * (VOCAB - len(vocab))


def test_the_drafts_copy_has_n_rows_and_its_bytes_are_counted() -> None:
    decoder = LayeredDecoder(tiny_model().bfloat16())
    before, vocab = decoder.head[0].clone(), torch.arange(1, 200, 3)
    skip = LayerSkipDrafter(decoder, 3, vocab)
    assert isinstance(skip.head.weight, torch.Tensor)
    assert skip.head.weight.shape == (67, 96) and skip.head.weight.is_contiguous()
    assert torch.equal(skip.head.weight, before[vocab]) and torch.equal(decoder.head[0], before)
    assert skip.num_bytes == 67 * 96 * 2 == DRAFTERS["exit-head"](decoder, vocab).num_bytes
    whole = LayerSkipDrafter(decoder, 3)
    assert whole.num_bytes == 0 and whole.head.weight is decoder.head[0], "the whole head is the model's own"

    packed, all_packed = LowPrecisionDrafter(decoder, 4, 8, vocab=vocab), LowPrecisionDrafter(decoder, 4, 8)
    assert isinstance(packed.head.weight, PackedWeight) and packed.head.weight.shape == (67, 96)
    assert all_packed.num_bytes - packed.num_bytes == (VOCAB - 67) * (128 + 4), "rows are whole blocks"
    assert packed.num_bytes == estimate_bytes(decoder, 4, 8, None, 67)
    own = LowPrecisionDrafter(decoder, 4, 16, vocab=vocab)
    assert own.num_bytes == estimate_bytes(decoder, 4, 16, None, 67)


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2, 3], [-1, 4], [4, VOCAB]])
def test_a_vocabulary_that_is_none_is_an_error(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="rising ids"):
        DraftHead(LayeredDecoder(tiny_model()), torch.tensor(ids, dtype=torch.long))


@pytest.fixture
def ranked(save_tiny: Callable[..., Path]) -> Path:
    """A checkpoint with 100 ranked tokens beside it."""
    directory = save_tiny("ranked", late=0.3)
    counts = TokenCounts(VOCAB)
    counts.add("numbers", [[token] * (200 - token) for token in range(99)])
    write_draft_vocab(directory, counts.draft_vocab(directory, [END], 1000))
    return directory


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"exit_layer": 3}, LayerSkipDrafter),
        ({"drafter": "low-precision"}, LowPrecisionDrafter),
        ({"drafter": "hybrid"}, HybridDrafter),
        ({"drafter": "hybrid", "hybrid_with": "layer-skip", "exit_layer": 3}, HybridDrafter),
        ({"drafter": "low-precision", "k_policy": "cost"}, LowPrecisionDrafter),
    ],
)
def test_decode_reads_the_file_beside_the_checkpoint(ranked: Path, options: dict[str, Any], kind: type) -> None:
    tokenizer, request = load_tokenizer(str(ranked)), Request("a", [5, 6, 7, 5, 6, 7, 5, 6], 40)
    [plain], _ = make_plan(str(ranked), tokenizer, None, DecodeConfig()).generate([request], GREEDY)
    plan = make_plan(str(ranked), tokenizer, None, DecodeConfig(draft_vocab=60, **options))
    assert isinstance(plan.drafter, kind)
    [completion], _ = plan.generate([request], GREEDY)
    assert completion.token_ids == plain.token_ids
    head = plan.drafter.parts()[-1].head
    assert head.vocab.tolist() == [*range(59), END] and head.weight.shape[0] == 60


def test_an_exit_head_takes_it_too(ranked: Path) -> None:
    from selfspec_tune.artifact import fingerprint
    from selfspec_tune.model.exit_head import HeadFacts, save_exit_head

    head = ExitHead(tiny_model(late=0.3), 2, torch.float32)
    save_exit_head(ranked, head, HeadFacts(2, fingerprint(ranked), "kl", 1, {}), torch.float32)
    plan = make_plan(str(ranked), None, None, DecodeConfig(drafter="exit-head", draft_vocab=60))
    assert isinstance(plan.drafter, ExitHeadDrafter) and plan.drafter.head.weight.shape[0] == 60


@pytest.mark.parametrize(
    "options, message",
    [
        (DecodeConfig(drafter="copy", draft_vocab=60), "no effect with --drafter copy"),
        (DecodeConfig(drafter="low-precision", draft_vocab=0), "too small"),
        (DecodeConfig(exit_layer=2, draft_vocab=-5), "too small"),
        (DecodeConfig(draft_vocab=60), "--draft-vocab needs a draft"),
        (DecodeConfig(draft_vocab=60, no_speculation=True), "both asked for"),
    ],
)
def test_options_it_does_not_go_with(options: DecodeConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(None, options, "m")


def test_a_file_that_is_not_there_or_of_other_weights_is_a_user_error(ranked: Path, checkpoint: Path) -> None:
    options = DecodeConfig(exit_layer=3, draft_vocab=60)
    with pytest.raises(UserError, match="has no draft vocabulary"):
        make_plan(str(checkpoint), None, None, options)
    content = json.loads((ranked / FILE_NAME).read_text())
    (ranked / FILE_NAME).write_text(json.dumps(content | {"checkpoint_fingerprint": "0" * 64}))
    with pytest.raises(UserError, match="other weights"):
        make_plan(str(ranked), None, None, options)
    with pytest.raises(UserError, match="beside a checkpoint"):
        read_vocab("some/hub-name", 60)


def test_costs_measured_with_the_whole_head_are_not_held_against_a_smaller_one() -> None:
    good = Artifact("f", "llama", 6, True, "", exit_layer=3, num_draft_tokens=4, cost_ratio=0.3, verify_ratio=1.2)
    options = DecodeConfig(draft_vocab=60, k_policy="fixed")
    choice = choose(good, options, "m")
    assert choice.settings == DraftSettings("layer-skip", 3, draft_vocab=60)
    assert not choice.as_measured and choose(good, DecodeConfig(), "m").as_measured
