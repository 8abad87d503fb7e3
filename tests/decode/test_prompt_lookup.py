"""Drafting by copying: the index against brute force, its cost by count, the proposals, and that output is unchanged.

False-alarm probability of the chi-square test: 1e-6 (the seed is fixed, so a pass stays a pass).
"""

from __future__ import annotations

import random

import pytest
import torch
from tiny import tiny_model

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import Draft, Source
from selfspec_tune.decode.drafters.prompt_lookup import LONGEST_MATCH, CopyIndex, PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import SamplingParams, distribution
from selfspec_tune.model.decoder import LayeredDecoder

GREEDY = SamplingParams()
FALSE_ALARM = 1e-6


def index_of(text: list[int]) -> CopyIndex:
    index = CopyIndex()
    for token in text:
        index.append(token)
    return index


def longest_match(text: list[int]) -> tuple[int, int]:
    """The same as `CopyIndex.match`, by trying every length at every position."""
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        for position in range(len(text) - 2, length - 2, -1):
            if text[position - length + 1 : position + 1] == text[-length:]:
                return length, position
    return 0, -1


@pytest.mark.parametrize("alphabet", [1, 2, 3, 10, 100])
def test_index_finds_what_brute_force_finds(alphabet):
    draws, lengths = random.Random(alphabet), set()
    for _ in range(8):
        text, index = [], CopyIndex()
        while len(text) < 120:
            # Now and then a piece of the text comes again, so that long matches end in every way.
            start = draws.randrange(len(text) + 1)
            piece = text[start : start + draws.randrange(25)] if draws.random() < 0.1 else [draws.randrange(alphabet)]
            for token in piece:
                text.append(token)
                index.append(token)
                assert index.match() == longest_match(text)
                lengths.add(index.match()[0])
    assert {0, 1, 2, 3, LONGEST_MATCH} <= lengths


class Counted:
    """Containers that count the elements read and written."""

    def __init__(self) -> None:
        self.count = 0
        outer = self

        class List(list):
            def __getitem__(self, at):
                found = list.__getitem__(self, at)
                outer.count += len(found) if isinstance(at, slice) else 1
                return found

            def __setitem__(self, at, value):
                outer.count += 1
                list.__setitem__(self, at, value)

            def __iter__(self):
                return (self[at] for at in range(len(self)))

            def append(self, value):
                outer.count += 1
                list.append(self, value)

        class Dict(dict):
            def get(self, key, default=None):
                outer.count += 1
                return dict.get(self, key, default)

            def __setitem__(self, key, value):
                outer.count += 1
                dict.__setitem__(self, key, value)

        self.index = CopyIndex()
        for name, value in vars(self.index).items():
            if isinstance(value, list | dict):
                setattr(self.index, name, (List if isinstance(value, list) else Dict)(value))


def long_text(kind: str, length: int = 32_768) -> list[int]:
    draws = random.Random(0)
    if kind == "one token":
        return [7] * length
    if kind == "a long block again and again":
        block = [draws.randrange(1000) for _ in range(5000)]
        return (block * (length // len(block) + 1))[:length]
    return [draws.randrange(2 if kind == "two tokens" else 1000) for _ in range(length)]


@pytest.mark.parametrize("kind", ["one token", "two tokens", "a thousand tokens", "a long block again and again"])
def test_the_work_per_token_does_not_grow_with_the_text(kind):
    """Counted, not timed: reads and writes of the index's own containers for each of 32,768 tokens."""
    counted, tokens = Counted(), long_text(kind)
    # On each level a lookup, a token, two of the node's values read and two written; then new leaves of three values
    # each, and the continuation.
    bound = 10 * LONGEST_MATCH + MAX_DRAFT_TOKENS + 2
    for token in tokens:
        before = counted.count
        counted.index.append(token)
        if counted.index.match()[0]:
            counted.index.continuation(MAX_DRAFT_TOKENS)
        assert 0 < counted.count - before <= bound
    # Nodes are made for what repeats only: an index of all n-grams would hold 16 per token.
    assert len(counted.index._children) <= (7 if kind == "two tokens" else 3.2) * len(tokens)


def test_the_most_recent_of_equally_long_matches_is_copied():
    index = index_of([1, 2, 30, 1, 2, 40, 1, 2])
    assert index.match() == (2, 4)
    assert index.continuation(3) == [40, 1, 2]


def test_a_longer_match_is_preferred_to_a_more_recent_one():
    assert index_of([5, 1, 2, 30, 1, 2, 40, 5, 1, 2]).match() == (3, 2)


def test_a_copy_that_reaches_the_end_of_the_text_goes_on_with_itself():
    assert index_of([9, 9]).continuation(5) == [9] * 5
    assert index_of([4, 5, 6, 7, 5, 6, 7]).continuation(8) == [5, 6, 7, 5, 6, 7, 5, 6]
    with pytest.raises(ValueError, match="nothing to copy"):
        index_of([1, 2, 3]).continuation(2)


def drafter_of(*texts: list[int]) -> PromptLookupDrafter:
    drafter = PromptLookupDrafter()
    drafter.start(list(texts))
    return drafter


def propose(drafter: PromptLookupDrafter, k: int, batch: int) -> list[list[int]]:
    draft = drafter.propose(torch.zeros(batch, dtype=torch.long), None, k, None, drafter.sources()[0])
    assert draft.probabilities is None and draft.hidden is None and draft.resume_layer == 0
    return draft.tokens.tolist()


def repeated(length: int) -> list[int]:
    """A text whose longest match is `length` tokens long."""
    return [*range(100, 100 + length), 1, 2, *range(100, 100 + length)]


@pytest.mark.parametrize(
    ("length", "source"),
    [
        (0, None),
        (1, None),
        (2, Source("copy", "short", 2)),
        (3, Source("copy", "short", 2)),
        (4, Source("copy", "medium", 4)),
        (7, Source("copy", "medium", 4)),
        (8, Source("copy", "long", MAX_DRAFT_TOKENS)),
        (40, Source("copy", "long", MAX_DRAFT_TOKENS)),
    ],
)
def test_a_longer_match_proposes_more(length, source):
    assert drafter_of(repeated(length)).sources() == ([source] if source else [])


def test_emitted_tokens_are_copied_too():
    drafter = drafter_of([1, 2, 3])
    assert drafter.sources() == []
    drafter.extend(0, [4, 2, 3])
    assert propose(drafter, 3, 1) == [[4, 2, 3]]


def test_the_best_row_decides_and_rows_without_a_match_are_filled_up():
    drafter = drafter_of([1, 2, 3], repeated(2), repeated(5))
    assert [source.quality for source in drafter.sources()] == ["medium"]
    # The fourth row of the batch is idle.
    assert propose(drafter, 3, 4) == [[3, 3, 3], [1, 2, 100], [1, 2, 100], [0, 0, 0]]


def test_a_finished_row_asks_for_no_draft():
    drafter = drafter_of(repeated(8), [1, 2, 3])
    drafter.extend(0, [1])
    drafter.extend(1, [4])
    assert [source.quality for source in drafter.sources()] == ["long"]
    drafter.extend(1, [5])
    assert drafter.sources() == []
    drafter.extend(1, [1, 2])
    assert [source.quality for source in drafter.sources()] == ["short"]


def test_a_new_start_forgets_the_old_texts():
    drafter = drafter_of(repeated(8), repeated(8))
    drafter.extend(0, [1])
    drafter.start([[100, 101, 102], [1, 2, 3]])
    assert drafter.sources() == []
    drafter.extend(0, [9])
    drafter.extend(1, [1, 2])
    assert propose(drafter, 1, 2) == [[9], [3]]


VOCAB = 16
"""So few tokens that a random model repeats itself, now and then as it did before."""


def small_decoder(dtype: torch.dtype = torch.float32, **settings) -> LayeredDecoder:
    settings = {"vocab_size": VOCAB, "late": 0.3, "eos_token_id": None, "pad_token_id": None} | settings
    return LayeredDecoder(tiny_model(**settings).to(dtype))


def repetitive(length: int, seed: int) -> list[int]:
    """A prompt in which pieces come again."""
    draws, text = random.Random(seed), []
    while len(text) < length:
        start = draws.randrange(max(1, len(text) - 20))
        text += text[start : start + 12] + [draws.randrange(VOCAB) for _ in range(6)]
    return text[:length]


def same_bits(plain: Completion, other: Completion) -> bool:
    assert len(plain.token_ids) == len(plain.logits) and len(other.token_ids) == len(other.logits)
    return plain.token_ids == other.token_ids and all(map(torch.equal, plain.logits, other.logits))


def generate(engine: Engine, requests: list[Request], params: SamplingParams = GREEDY) -> tuple:
    """Plain completions, those with copied drafts, and the statistics of the latter."""
    plain, _ = engine.generate(requests, params)
    copied, stats = engine.generate(requests, params, PromptLookupDrafter(), DraftPolicy(MAX_DRAFT_TOKENS))
    assert stats.drafter == "copy" and stats.exit_layer is None
    assert 0 < stats.accepted < stats.drafted, "one of acceptance and rejection was not tested"
    return plain, copied, stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[120], [5, 126, 240]], ids=["alone", "ragged"])
def test_greedy_text_and_logits_equal_plain_decoding_bit_for_bit(dtype, lengths):
    engine = Engine(small_decoder(dtype), batch_size=len(lengths), keep_logits=True)
    # Rows of their own lengths that end one after the other.
    requests = [Request(str(row), repetitive(length, row), 100 + 30 * row) for row, length in enumerate(lengths)]
    plain, copied, _ = generate(engine, requests)
    assert all(map(same_bits, plain, copied))
    assert [len(completion.token_ids) for completion in plain] == [100 + 30 * row for row in range(len(lengths))]


def test_fewer_requests_than_rows():
    engine = Engine(small_decoder(), batch_size=3, keep_logits=True)
    plain, copied, _ = generate(engine, [Request("a", repetitive(60, 1), 80)])
    assert same_bits(plain[0], copied[0])


def test_shared_noise_gives_the_same_text_with_copying_on_or_off():
    engine = Engine(small_decoder(), batch_size=2)
    requests = [Request(name, repetitive(80, seed), 150) for seed, name in enumerate("ab")]
    for temperature in (0.3, 1.0):
        params = SamplingParams(temperature, top_k=8, seed=5, reproducible=True)
        plain, copied, _ = generate(engine, requests, params)
        assert [completion.token_ids for completion in copied] == [completion.token_ids for completion in plain]


def fits(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Chi-square test of counts against probabilities; cells expected fewer than 5 times are taken together."""
    if counts[expected == 0].any():
        return False
    scaled = expected * counts.sum()
    large = scaled >= 5
    pooled = torch.stack([scaled[~large].sum(), counts[~large].sum()])[:, None]
    scaled, counts = (torch.cat(pair) for pair in ((scaled[large], pooled[0]), (counts[large], pooled[1])))
    scaled, counts = scaled[scaled > 0], counts[scaled > 0]
    statistic = ((counts - scaled) ** 2 / scaled).sum()
    return bool(torch.special.gammaincc(torch.tensor((len(scaled) - 1) / 2), statistic / 2) > FALSE_ALARM)


class HalfSure(PromptLookupDrafter):
    """A fault: says that copied tokens were drawn with probability 1/2, so they stand twice as often as they may."""

    def propose(self, *args) -> Draft:
        tokens = super().propose(*args).tokens
        return Draft(tokens, torch.nn.functional.one_hot(tokens, 8).float() / 2, None, 0)


@pytest.mark.parametrize(("drafter", "right"), [(PromptLookupDrafter(), True), (HalfSure(), False)])
def test_sampled_three_token_sequences_follow_the_target(drafter, right):
    """The whole engine, 2,000 requests in batches, the ratio test with a one-hot q; and that a wrong q is caught.

    The prompt has a match for some first tokens and none for others: those rows are filled up.
    """
    vocab, batch, batches, prompt = 8, 200, 10, [1, 2, 3, 1, 4, 1, 5, 2, 1]
    decoder = small_decoder(vocab_size=vocab, num_hidden_layers=2)
    engine = Engine(decoder, numerics="fast", batch_size=batch)
    params = SamplingParams(1.2, top_k=5)
    counts, accepted, drafted = torch.zeros(vocab, vocab, vocab, dtype=torch.double), 0, 0
    for number in range(batches):
        requests = [Request(f"{number}-{row}", prompt, 4) for row in range(batch)]
        completions, stats = engine.generate(requests, params, drafter, DraftPolicy(4))
        accepted, drafted = accepted + stats.accepted, drafted + stats.drafted
        for completion in completions:
            counts[tuple(completion.token_ids[:3])] += 1
    assert drafted > batch * batches and 200 < accepted < drafted / 2

    tokens = torch.arange(vocab)
    pairs = torch.cartesian_prod(tokens, tokens)
    with torch.inference_mode():
        sequences = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], 1)
        logits = decoder.model(sequences, attention_mask=torch.ones_like(sequences)).logits[:, -3:]
    p = distribution(logits, params).double().view(vocab, vocab, 3, vocab)
    expected = p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]
    assert fits(counts, expected) == right
