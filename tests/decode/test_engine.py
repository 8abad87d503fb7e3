"""The decoding loop: cut-offs, statistics, and errors for what cannot be decoded."""

from __future__ import annotations

import pytest
import torch
from tiny import END, byte_tokenizer, tiny_model

from selfspec_tune.decode.drafters import Source
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import ContextCosts, CostPolicy, DraftCosts, DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder

GREEDY = SamplingParams()
PROMPT = [int(b) for b in b"def add(left, right):"]


@pytest.fixture(scope="module")
def decoder() -> LayeredDecoder:
    # The byte tokenizer has no text for ids above 256, so those are kept from being chosen.
    model = tiny_model(late=0.1)
    with torch.no_grad():
        model.lm_head.weight[END:] *= 1e-3
    return LayeredDecoder(model)


def both(engine: Engine, request: Request, exit_layer: int = 3, k: int = 4):
    """Completion of plain decoding and of speculation."""
    plain = engine.generate([request], GREEDY)[0][0]
    drafter = LayerSkipDrafter(engine.decoder, exit_layer)
    spec, stats = engine.generate([request], GREEDY, drafter, DraftPolicy(k))
    return plain, spec[0], stats


def test_stops_at_an_end_token_inside_an_accepted_run(decoder):
    engine = Engine(decoder)
    free = engine.generate([Request("a", PROMPT, 60)], GREEDY)[0][0].token_ids
    checked_inside = 0
    for end in set(free[5:]):
        expected = free[: free.index(end) + 1]
        engine.end_tokens = frozenset([end])
        plain, spec, stats = both(engine, Request("a", PROMPT, 60))
        assert plain.token_ids == spec.token_ids == expected
        assert plain.finish_reason == spec.finish_reason == "eos"
        # More tokens were accepted than emitted where the end lay inside a run.
        checked_inside += stats.accepted + stats.rounds + 1 > len(expected)
    assert checked_inside > 0


def test_stop_string_that_spans_two_tokens_cuts_text_and_tokens(decoder):
    engine = Engine(decoder, byte_tokenizer())
    free = engine.generate([Request("a", PROMPT, 60)], GREEDY)[0][0]
    at = next(i for i in range(8, 50) if free.text[i : i + 2].isascii() and free.text[i : i + 2].isprintable())
    stop = free.text[at : at + 2]
    plain, spec, _ = both(engine, Request("a", PROMPT, 60, (stop,)))
    assert plain.finish_reason == spec.finish_reason == "stop"
    assert plain.text == spec.text == free.text[: free.text.index(stop)]
    assert plain.token_ids == spec.token_ids == free.token_ids[: len(plain.token_ids)]
    assert stop in byte_tokenizer().decode(plain.token_ids)
    assert stop not in byte_tokenizer().decode(plain.token_ids[:-1])


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 4, 5, 6])
def test_max_new_tokens(decoder, max_new_tokens):
    plain, spec, stats = both(Engine(decoder), Request("a", PROMPT, max_new_tokens))
    assert len(plain.token_ids) == max_new_tokens
    assert plain.token_ids == spec.token_ids
    assert plain.finish_reason == spec.finish_reason == "length"
    assert stats.emitted == max_new_tokens


def test_prompt_of_one_token(decoder):
    plain, spec, _ = both(Engine(decoder), Request("a", [65], 20))
    assert plain.token_ids == spec.token_ids and len(plain.token_ids) == 20


def test_the_context_ends_a_completion():
    decoder = LayeredDecoder(tiny_model(max_position_embeddings=40))
    plain, spec, _ = both(Engine(decoder), Request("a", PROMPT, 100))
    assert len(plain.token_ids) == 40 - len(PROMPT)
    assert plain.token_ids == spec.token_ids and spec.finish_reason == "length"


def test_what_cannot_be_decoded_is_a_user_error(decoder):
    engine = Engine(decoder)
    with pytest.raises(UserError, match="empty"):
        engine.generate([Request("a", [], 5)], GREEDY)
    with pytest.raises(UserError, match="longer than the model's context"):
        engine.generate([Request("a", [1] * 1024, 5)], GREEDY)
    with pytest.raises(UserError, match="negative"):
        engine.generate([Request("a", [1], -1)], GREEDY)
    for exit_layer in (0, 6, -1):
        with pytest.raises(UserError, match="exit_layer is out of range"):
            LayerSkipDrafter(decoder, exit_layer)


def test_statistics_add_up(decoder):
    _, spec, stats = both(Engine(decoder), Request("a", PROMPT, 61), k=3)
    values = stats.to_dict()
    # The first token comes from prefill; the last round may have been cut.
    assert 1 + stats.accepted + stats.rounds >= stats.emitted == len(spec.token_ids)
    assert stats.drafted >= stats.tested >= stats.accepted
    assert values["alpha"] == stats.accepted / stats.tested
    assert values["accepted_fraction"] == stats.accepted / stats.drafted
    assert values["tokens_per_round"] == (stats.accepted + stats.rounds) / stats.rounds
    # No end cut a run here: every token came from the prompt's pass, a round or a plain step.
    assert stats.from_prefill + stats.accepted + stats.rounds + stats.plain_steps == stats.emitted
    assert values["by_drafter"]["layer-skip"]["drafted"] == stats.drafted


class EveryOther(DraftPolicy):
    """A plain step, a round, a plain step … as far as tokens are wanted."""

    plain = 0

    def next(self, remaining, sources):
        planned = super().next(remaining, sources) if self.plain > self._rounds_planned else None
        self.plain += planned is None
        self._rounds_planned += planned is not None
        return planned

    _rounds_planned = 0


def test_an_end_inside_an_accepted_run_makes_no_plain_step_disappear(decoder):
    free, _, _ = both(Engine(decoder), Request("a", PROMPT, 60))
    cut = 0
    for end in dict.fromkeys(free.token_ids[5:40]):
        policy = EveryOther(8)
        request = Request("a", PROMPT, 60)
        _, stats = Engine(decoder, end_tokens=(end,)).generate([request], GREEDY, LayerSkipDrafter(decoder, 3), policy)
        cut += 1 + stats.accepted + stats.rounds + stats.plain_steps > stats.emitted
        assert stats.plain_steps == policy.plain
    assert cut > 0


def test_the_last_token_takes_no_draft(decoder):
    _, _, stats = both(Engine(decoder), Request("a", PROMPT, 2))
    assert stats.drafted == 0


def test_text_streams_in_whole_characters(decoder):
    engine, pieces = Engine(decoder, byte_tokenizer()), []
    completions, _ = engine.generate([Request("a", PROMPT, 60)], GREEDY, on_text=lambda row, text: pieces.append(text))
    assert "".join(pieces) == completions[0].text
    assert len(pieces) > 5


def test_shared_noise_gives_the_same_text_with_speculation_on_or_off(decoder):
    engine = Engine(decoder, batch_size=2)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, reproducible=True)
    requests = [Request("a", PROMPT, 120), Request("b", PROMPT, 120)]
    plain = [completion.token_ids for completion in engine.generate(requests, params)[0]]
    assert plain[0] != plain[1]
    for exit_layer, k in ((2, 1), (3, 4), (5, 7)):
        drafter = LayerSkipDrafter(decoder, exit_layer)
        spec, stats = engine.generate(requests, params, drafter, DraftPolicy(k))
        assert [completion.token_ids for completion in spec] == plain
        assert stats.accepted > 0
    alone = engine.generate([requests[1]], params)[0][0]
    assert alone.token_ids == plain[1], "the noise is keyed by request, not by slot"


def test_sampling_depends_on_seed_and_request_only(decoder):
    engine = Engine(decoder, batch_size=2)
    first = engine.generate([Request("a", PROMPT, 40), Request("b", PROMPT, 40)], SamplingParams(1.0, seed=1))[0]
    again = engine.generate([Request("b", PROMPT, 40)], SamplingParams(1.0, seed=1))[0]
    other = engine.generate([Request("b", PROMPT, 40)], SamplingParams(1.0, seed=2))[0]
    assert first[1].token_ids == again[0].token_ids != other[0].token_ids


def test_a_row_near_the_end_of_the_context_beside_a_shorter_one():
    """Its neighbour still drafts k tokens, whose positions for this row lie beyond the context."""
    decoder = LayeredDecoder(tiny_model(max_position_embeddings=64, late=0.1))
    engine = Engine(decoder, batch_size=2)
    requests = [Request("a", [1] * 60, 50), Request("b", [2] * 5, 50)]
    plain, _ = engine.generate(requests, GREEDY)
    spec, _ = engine.generate(requests, GREEDY, LayerSkipDrafter(decoder, 3), DraftPolicy(7))
    assert [len(completion.token_ids) for completion in plain] == [4, 50]
    assert [completion.token_ids for completion in spec] == [completion.token_ids for completion in plain]


def test_drafting_that_does_not_pay_stops_and_says_so(decoder):
    engine = Engine(decoder)
    policy = DraftPolicy(3, round_cost=9.0)
    plain = engine.generate([Request("a", PROMPT, 150)], GREEDY)[0][0]
    spec, stats = engine.generate([Request("a", PROMPT, 150)], GREEDY, LayerSkipDrafter(decoder, 3), policy)
    assert policy.stopped and not stats.enabled and "drafting stopped" in stats.reason
    assert spec[0].token_ids == plain.token_ids


class MovingExit(DraftPolicy):
    """Leaves at another layer every few rounds; plans 3 tokens, and a plain step now and then."""

    def __init__(self, exits: tuple[int, ...]) -> None:
        super().__init__(3)
        self.exits, self.asked, self.used, self.accepted = exits, 0, [], {}

    def at(self, context_length: int) -> int:
        self.asked += 1
        self.used.append((context_length, self.exits[self.asked // 3 % len(self.exits)]))
        return self.used[-1][1]

    def next(self, remaining: int, sources: list[Source]) -> tuple[Source, int] | None:
        return super().next(remaining, sources[-1:]) if self.asked % 7 else None

    def observe(self, source: Source, k: int, accepted: int) -> None:
        exit_layer = self.used[-1][1]
        self.accepted[exit_layer] = self.accepted.get(exit_layer, 0) + accepted


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_draft_may_leave_at_another_layer_in_every_round(decoder, hybrid, batch):
    engine = Engine(decoder, batch_size=batch, keep_logits=True)
    requests = [Request(str(row), PROMPT[row:], 90 - 20 * row) for row in range(batch)]
    plain, _ = engine.generate(requests, GREEDY)
    skip = LayerSkipDrafter(decoder, 3)
    drafter = HybridDrafter(PromptLookupDrafter(), skip) if hybrid else skip
    policy, depths = MovingExit((1, 4, 2, 5)), set()
    engine.after_commit = lambda cache: depths.add((drafter.exit_layer, skip.exit_layer))
    spec, stats = engine.generate(requests, GREEDY, drafter, policy)
    assert depths == {(e, e) for e in (1, 2, 4, 5)}, "the hybrid passes it on"
    assert all(policy.accepted[e] > 0 for e in (2, 4, 5)) and stats.accepted < stats.drafted
    assert policy.used[0][0] == len(PROMPT) + 1, "the longest text, its newest token included"
    for one, other in zip(plain, spec, strict=True):
        assert one.token_ids == other.token_ids
        assert all(map(torch.equal, one.logits, other.logits))


def test_costs_by_context_move_the_exit_and_switch_off(decoder):
    free = {"layer-skip": DraftCosts(0.0, (1.0,) * 8)}
    begin = len(PROMPT)
    entries = (
        ContextCosts(begin + 20, free, exit_layer=2),
        ContextCosts(begin + 40, free, exit_layer=4),
        ContextCosts(begin + 50, free, exit_layer=4, enabled=False),
    )
    engine, drafter = Engine(decoder), LayerSkipDrafter(decoder, 3)
    plain, _ = engine.generate([Request("a", PROMPT, 90)], GREEDY)
    seen = []
    engine.after_commit = lambda cache: seen.append((int(cache.committed[0]) + 1 - begin, drafter.exit_layer))
    spec, stats = engine.generate([Request("a", PROMPT, 90)], GREEDY, drafter, CostPolicy(free, by_context=entries))
    assert spec[0].token_ids == plain[0].token_ids
    # Lengths after each commit: a round that began within 20 new tokens used exit 2.
    begins = [1, *(length for length, _ in seen[:-1])]
    assert [exit_layer for _, exit_layer in seen] == [2 if length <= 20 else 4 for length in begins]
    assert {2, 4} == {exit_layer for _, exit_layer in seen}
    assert stats.plain_steps >= 90 - 40 - 9, "beyond 40 new tokens every step is plain"
    assert stats.rounds > 0 and stats.passes == stats.rounds + stats.plain_steps


def test_passes_and_seconds_of_plain_steps_are_counted(decoder):
    engine = Engine(decoder, batch_size=2)
    requests = [Request("a", PROMPT, 20), Request("b", PROMPT[1:], 30)]
    _, stats = engine.generate(requests, GREEDY)
    assert stats.passes == 29 and stats.plain_steps == 19 + 29, "passes are of the batch, steps of rows"
    assert stats.plain_seconds > 0 == stats.verify_seconds == stats.draft_seconds
    assert stats.prefill_seconds + stats.plain_seconds <= stats.total_seconds
    _, spec = engine.generate(requests, GREEDY, LayerSkipDrafter(decoder, 3), DraftPolicy(3))
    assert spec.passes < 29 and spec.rounds > spec.passes - spec.plain_steps


def test_counts_are_read_back(decoder):
    _, stats = Engine(decoder).generate([Request("a", PROMPT, 40)], GREEDY, LayerSkipDrafter(decoder, 3), EveryOther(3))
    again = Stats.of_counts(stats.counts())
    for name in ("rounds_of", "rounds", "drafted", "accepted", "tested", "plain_steps", "emitted", "from_prefill"):
        assert getattr(again, name) == getattr(stats, name) and getattr(stats, name), name
    assert again.total_seconds == 0
