"""How many tokens the next round drafts, and from which source: a fixed k, k by a window, or what pays most.

A policy knows counts and measured costs only: no clock, no randomness, no tensors. The same observations give the same
plans. Text is the target's own whatever is planned.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import Source

LEAST_ROUNDS = 24
"""Rounds seen before a fixed k is judged."""
MARGIN = 4.5
"""Standard errors by which the mean must lie below what pays, many as every round is judged: a draft that gains 2.5 %
is stopped in about 1 of 200 runs of 2,000 rounds, one far from paying after the first `LEAST_ROUNDS` rounds."""
WINDOW = 64
"""Tested draft tokens from which `WindowPolicy` judges."""
RAISE_ABOVE, LOWER_BELOW = 0.85, 0.70
"""Acceptance in the window from which k grows, and shrinks."""
DEFAULT_ALPHA = 0.5
"""Acceptance of a drafter nothing is known about."""
LEVELS = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.985)
"""Acceptances between which a source's present one is looked for."""
ALPHA_WEIGHT, ANYTHING = 8.0, 0.4
"""The first belief: weight of the given α in tested tokens, and share of it that takes every level for as likely."""
CHANGE = 1 / 80
"""Chance per tested token that the text becomes another kind, and the level another."""
HISTORY, FIRST_BELIEF = 150.0, 0.2
"""What is expected then: the belief of the last tested tokens, and a share of the first belief."""
POSITION_LIFE, POSITION_WEIGHT = 150.0, 4.0
"""Own tested tokens that a position remembers, and the weight in tokens of the position before it."""
CONFIDENCES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Edges of the bins in which a draft's confidence in one token is calibrated."""
CONFIDENCE_LIFE, CONFIDENCE_PRIOR = 64.0, 6.0
"""Tested tokens that a bin remembers, and the weight in tokens of the position's acceptance against them."""
PURSE, TRICKLE = 2.5, 0.005
"""Plain steps that each drafter may lose at first, and how many more all together per plain step's worth of time."""
PROBE_SHARE, LEAST_PROBE_SHARE = 0.02, 0.01
"""Share of the time that probes of sources not in use may lose, all together; each that fails halves its source's, down
to the second."""
DEEPER_SHARE = 0.0025
"""The same for drafting one token more than planned from the source in use."""


class Policy:
    """Asked before every round; `k` is the number of draft tokens per round, or the most where it varies."""

    k: int
    stopped: bool = False
    wants_confidence: bool = False
    """Whether `enough` is asked, which costs the draft a look at its probabilities."""

    def at(self, context_length: int) -> int | None:
        """Learn before `next` how long the longest text is; return its exit layer, None for the drafter's own."""
        return None

    def next(self, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
        """Return from which source to draft how many (1 or more) tokens; None to take a plain step.

        Args:
            remaining: tokens still wanted; at most one fewer is drafted.
            sources: what the drafter offers this round.
        """
        raise NotImplementedError

    def enough(self, source: Source, confidence: float) -> bool:
        """Whether the draft should end here, asked after each drafted token but the last one planned.

        Args:
            confidence: product of the draft's top probabilities so far in this round, 0..1; a mean over rows.
        """
        return False

    def observe(self, source: Source, k: int, accepted: int) -> None:
        """Learn that of k tokens drafted from `source` so many were accepted; once per row of a round.

        Rounds are observed in the order they were planned in.
        """

    def settle(self) -> None:
        """Learn that the round just observed was observed for all its rows."""

    def forget(self) -> None:
        """Learn that rounds planned and not observed so far never will be."""


@dataclass
class DraftPolicy(Policy):
    """`fixed`: k tokens from the first source, watched.

    With measured costs, drafting stops for the rest of the run when its rounds emit clearly fewer tokens than plain
    decoding would have in the same time. Greedy text and text with shared noise are the same either way.

    Args:
        k: draft tokens per round; 0 decodes plainly.
        round_cost: what a round of k costs in plain steps, c·k + v; None never stops drafting.
    """

    k: int
    round_cost: float | None = None
    stopped: bool = False
    _rounds: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def next(self, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
        """Plan k tokens, fewer where fewer are wanted or offered, until stopped."""
        return None if self.stopped else _first(self.k, remaining, sources)

    def observe(self, source: Source, k: int, accepted: int) -> None:
        """Count a full round, and judge."""
        if self.round_cost is None or k != self.k or k == 0:
            return
        emitted = accepted + 1
        self._rounds += 1
        self._sum += emitted
        self._squares += emitted * emitted
        if self._rounds < LEAST_ROUNDS:
            return
        mean = self._sum / self._rounds
        deviation = math.sqrt(max(self._squares / self._rounds - mean * mean, 1 / self._rounds))
        self.stopped = mean + MARGIN * deviation / math.sqrt(self._rounds) < self.round_cost


class WindowPolicy(Policy):
    """`window`: k from the first source, one more or one fewer per round by the acceptance of the last tested tokens.

    Knows no costs, so it never stops drafting.

    Args:
        k: draft tokens of the first rounds, until the window is full.
        k_min, k_max: bounds of k.
    """

    def __init__(self, k: int, k_min: int = 2, k_max: int = MAX_DRAFT_TOKENS) -> None:
        self.k, self._bounds = min(max(k, k_min), k_max), (k_min, k_max)
        self._stood: deque[bool] = deque(maxlen=WINDOW)
        self._news = False

    def next(self, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
        """Move k by at most one, if anything was observed since it was last looked at, and plan that many tokens."""
        if self._news and len(self._stood) == WINDOW:
            alpha = sum(self._stood) / WINDOW
            self.k += (alpha > RAISE_ABOVE) - (alpha < LOWER_BELOW)
            self.k = min(max(self.k, self._bounds[0]), self._bounds[1])
        self._news = False
        return _first(self.k, remaining, sources)

    def observe(self, source: Source, k: int, accepted: int) -> None:
        """Put the tested tokens of a round into the window: those accepted, and the first that was not."""
        self._stood.extend([True] * accepted + [False] * (accepted < k))
        self._news = True


def _first(k: int, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
    """Plan k tokens of the first source, or as many as are offered and can still be emitted."""
    k = min(k, remaining - 1, sources[0].most) if sources else 0
    return (sources[0], k) if k > 0 else None


@dataclass(frozen=True)
class DraftCosts:
    """What drafting costs, in plain decoding steps, as measured.

    Attributes:
        cost_ratio: c, one draft step.
        verify_ratio: v for 1, 2, … drafted tokens: last early pass, verification of one row more, acceptance.
        overhead: o, what a round costs besides.
    """

    cost_ratio: float
    verify_ratio: tuple[float, ...]
    overhead: float = 0.0

    def round(self, k: int) -> float:
        """Return what a round of k ≥ 1 draft tokens costs; a plain step, k = 0, costs 1."""
        return self.cost_ratio * k + self.verify_ratio[k - 1] + self.overhead if k else 1.0


@dataclass(frozen=True)
class ContextCosts:
    """Costs up to a context length.

    Attributes:
        max_context: the longest text, prompt included, they hold for.
        costs: by drafter.
        exit_layer: where layer skip leaves at such lengths; None for the drafter's own.
        enabled: whether to draft at all.
    """

    max_context: int
    costs: Mapping[str, DraftCosts]
    exit_layer: int | None = None
    enabled: bool = True


class CostPolicy(Policy):
    """`cost`: the source and k, 0 included, that promise most tokens per measured cost, learnt over a whole run.

    - *Plan*: a round of k promises 1 + p₁ + p₁p₂ + … tokens, p from `_Acceptance`. The plan with the best rate over its
      cost is taken if the rate is above 1, plain decoding's.
    - *Early stop*: where the draft tells its confidence, k is only a cap, as large as a token could pay that all before
      it are sure to have led to; `enough` ends the draft once one more token promises less than the rate times its
      cost. What the confidence in a token is worth is learnt in bins, starting from the position's acceptance.
    - *Probe*: one token more than planned, 1 from a source not in use, is drafted as soon as what that probably loses
      fits into a small share of the time since it was last done. So no estimate stays wrong for want of tests. A probe
      of an unused source that fails halves its share, a good one is followed by the next at once: a source that has
      become good is back within a few rounds.
    - *Purse*: of each drafter, `PURSE` steps, plus what its rounds gained over plain decoding, plus its part of
      `TRICKLE` of the time. It takes no round that could lose more (if costs grow with k). So whatever d drafters do,
      n tokens take at most (n + d · PURSE)/(1 − TRICKLE) steps, and a bad drafter does not keep a good one from trying.

    In a batch one plan serves all rows, and what a round emitted is the mean over them.

    Args:
        costs: by drafter; sources of a drafter without costs are not used.
        alphas: acceptance to start from, by drafter.
        k_max: most draft tokens per round.
        by_context: costs at some context lengths, the shortest first; the last holds beyond its own. None: `costs`.
    """

    wants_confidence = True

    def __init__(
        self,
        costs: Mapping[str, DraftCosts],
        alphas: Mapping[str, float] | None = None,
        k_max: int = MAX_DRAFT_TOKENS,
        by_context: Sequence[ContextCosts] = (),
    ) -> None:
        self._by_context, self._enabled = by_context, True
        self.k = min(k_max, MAX_DRAFT_TOKENS)
        self._costs: Mapping[str, DraftCosts] = dict(costs)
        self._alphas = dict(alphas or {})
        self._records: dict[tuple[str, str], _Record] = {}
        self._purses = dict.fromkeys(self._costs, PURSE)
        # Planned and not accounted for, the oldest first.
        self._rounds: deque[_Round] = deque()

    def at(self, context_length: int) -> int | None:
        """Take the costs for this length."""
        if not self._by_context:
            return None
        fitting = (entry for entry in self._by_context if context_length <= entry.max_context)
        entry = next(fitting, self._by_context[-1])
        self.settle()
        self._costs, self._enabled = entry.costs, entry.enabled
        return entry.exit_layer

    def next(self, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
        """Return the plan with the best rate, or a probe that is due; None to take a plain step."""
        self.settle()
        known = [source for source in sources if source.drafter in self._costs] if self._enabled else []
        options = [self._option(source, remaining) for source in known]
        best, best_k, rate = None, 0, 1.0
        for option in options:
            for k in range(1, len(option.tokens)):
                promised = option.tokens[k] / option.costs.round(k)
                if promised > rate and self._fits(option, k):
                    best, best_k, rate = option, k, promised
        if best is not None:
            best_k = self._cap(best, best_k, rate)
        plans = ((option, best_k if option is best else 0) for option in options)
        probe = next(((option, k + 1) for option, k in plans if self._due(option, k + 1, rate)), None)
        best, best_k = probe or (best, best_k)
        self._rounds.append(_Round(best, best_k, rate, probe is not None))
        return (best.source, best_k) if best is not None else None

    def enough(self, source: Source, confidence: float) -> bool:
        """Whether one more token promises less than the planned rate times what it costs."""
        now = self._rounds[-1] if self._rounds else None
        if now is None or now.option is None:
            return False
        record, costs, k = now.option.record, now.option.costs, len(now.confidences) + 1
        now.confidences.append(min(confidence / max(now.confidence, 1e-30), 1.0))
        now.confidence = confidence
        acceptance = record.acceptance.rates
        now.stands *= record.calibration.rate(now.confidences[-1], acceptance[k - 1])
        if k >= now.k or now.probe:
            return False
        return now.stands * acceptance[k] < now.rate * (costs.round(k + 1) - costs.round(k))

    def observe(self, source: Source, k: int, accepted: int) -> None:
        """Learn what became of a row's k draft tokens; k may be smaller than planned."""
        while self._rounds and self._rounds[0].option is None:
            self._account(self._rounds.popleft())
        record, now = self._record(source), self._rounds[0] if self._rounds else None
        if now is not None and now.option is not None and now.option.source == source:
            now.rows, now.emitted, now.drafted = now.rows + 1, now.emitted + accepted + 1, k
            for position, confidence in enumerate(now.confidences[: min(k, accepted + 1)]):
                record.calibration.observe(confidence, position < accepted)
        record.acceptance.observe(k, accepted)

    def forget(self) -> None:
        """Drop what was planned and not observed."""
        self.settle()
        self._rounds.clear()

    def settle(self) -> None:
        """Account for planned rounds that are over: plain ones, and those observed."""
        while self._rounds and (self._rounds[0].option is None or self._rounds[0].rows):
            self._account(self._rounds.popleft())

    def _account(self, now: _Round) -> None:
        """Learn what a round cost and emitted, at the costs it was planned with."""
        emitted = now.emitted / now.rows if now.option else 1.0
        cost = now.option.costs.round(now.drafted) if now.option else 1.0
        for drafter in self._purses:
            self._purses[drafter] += TRICKLE * cost / len(self._purses)
        for record in self._records.values():
            record.unused += cost
            record.shallow += cost
        if now.option is None:
            return
        self._purses[now.option.source.drafter] += emitted - cost
        used = now.option.record
        used.unused = 0.0
        if not now.probe:
            used.share = PROBE_SHARE
        elif now.k > 1:
            used.shallow = 0.0
        elif emitted < 1.5:
            used.share = max(LEAST_PROBE_SHARE, used.share / 2)
        else:
            used.unused = math.inf

    def _record(self, source: Source) -> _Record:
        key = (source.drafter, source.quality)
        if key not in self._records:
            self._records[key] = _Record(_Acceptance(self._alphas.get(source.drafter, DEFAULT_ALPHA)))
        return self._records[key]

    def _option(self, source: Source, remaining: int) -> _Option:
        record, costs = self._record(source), self._costs[source.drafter]
        stands, tokens = 1.0, [1.0]
        for rate in record.acceptance.rates[: max(0, min(remaining - 1, source.most, self.k, len(costs.verify_ratio)))]:
            stands *= rate
            tokens.append(tokens[-1] + stands)
        return _Option(source, record, costs, tokens)

    def _fits(self, option: _Option, k: int) -> bool:
        """Whether the drafter's purse allows a round of k tokens, of which all may be rejected."""
        return k < len(option.tokens) and option.costs.round(k) - 1 <= self._purses[option.source.drafter]

    def _cap(self, option: _Option, k: int, rate: float) -> int:
        """Return how many tokens to draft at most where `enough` will end the draft; k where it is never asked."""
        if option.record.calibration.empty:
            return k
        acceptance, cost = option.record.acceptance.rates, option.costs.round
        while self._fits(option, k + 1) and acceptance[k] > rate * (cost(k + 1) - cost(k)):
            k += 1
        return k

    def _due(self, option: _Option, k: int, rate: float) -> bool:
        """Whether to draft k tokens, one more than planned; never if no k could pay even at α = 1."""
        cost, record = option.costs.round, option.record
        if not self._fits(option, k) or all(j + 1 <= rate * cost(j) for j in range(1, len(option.tokens))):
            return False
        since, share = (record.unused, record.share) if k == 1 else (record.shallow, DEEPER_SHARE)
        return since * share / len(self._records) >= rate * cost(k) - option.tokens[k]


class _Acceptance:
    """`rates`: P(the draft token at a position stands | all before it in its round stood), of one source, as of now.

    A belief over `LEVELS`, updated by every tested token (Bayes), under the assumption that the level stays for some 80
    tokens and then becomes another, probably one met before. Steady text is so measured well, and a change noticed
    within a few rounds. At a level α a token stands with α^e, e by position: 1 at the first, and learnt slowly at the
    others, from how often tokens stood there against what the belief foretold with e = 1. A position seldom reached
    takes after the one before it.
    """

    def __init__(self, alpha: float) -> None:
        alpha = min(max(alpha, LEVELS[0]), LEVELS[-1])
        powers = [level ** (ALPHA_WEIGHT * alpha) * (1 - level) ** (ALPHA_WEIGHT * (1 - alpha)) for level in LEVELS]
        self._first = [(1 - ANYTHING) * power / sum(powers) + ANYTHING / len(LEVELS) for power in powers]
        self._belief, self._history = self._first, self._first
        # By position: [stood, foretold with e = 1, tested], decayed; the exponent; P(stands) at every level.
        self._counts = [[0.0, 0.0, 0.0] for _ in range(MAX_DRAFT_TOKENS)]
        self._exponents = [1.0] * MAX_DRAFT_TOKENS
        self._stands = [list(LEVELS)] * MAX_DRAFT_TOKENS
        self._foretell()

    def observe(self, k: int, accepted: int) -> None:
        """Learn from a round of k tokens: `accepted` stood, the one after them, if any, did not."""
        for position in range(min(k, accepted + 1)):
            stood, kept = position < accepted, 1 - 1 / POSITION_LIFE
            seen = (stood, _dot(self._belief, LEVELS), 1.0)
            self._counts[position] = [kept * old + new for old, new in zip(self._counts[position], seen, strict=True)]
            stands = self._stands[position]
            likely = [p * (s if stood else 1 - s) for p, s in zip(self._belief, stands, strict=True)]
            scale, known, new = (1 - CHANGE) / sum(likely), CHANGE * (1 - FIRST_BELIEF), CHANGE * FIRST_BELIEF
            self._belief = [
                scale * p + known * h + new * f for p, h, f in zip(likely, self._history, self._first, strict=True)
            ]
            self._history = [h + (p - h) / HISTORY for p, h in zip(self._belief, self._history, strict=True)]
        self._learn_positions()
        self._foretell()

    def _learn_positions(self) -> None:
        exponent = 1.0
        for position in range(1, MAX_DRAFT_TOKENS):
            stood, foretold, tested = self._counts[position]
            if tested:
                mean = foretold / tested
                rate = (stood + POSITION_WEIGHT * mean**exponent) / (tested + POSITION_WEIGHT)
                exponent = min(max(math.log(rate) / math.log(mean), 0.03), 6.0)
            if abs(exponent - self._exponents[position]) > 0.01:
                self._exponents[position] = exponent
                self._stands[position] = [level**exponent for level in LEVELS]

    def _foretell(self) -> None:
        """Set `rates`: that those before it stood makes high levels more likely for the next."""
        self.rates: list[float] = []
        joint, before = self._belief, 1.0
        for stands in self._stands:
            joint = [p * s for p, s in zip(joint, stands, strict=True)]
            together = sum(joint)
            self.rates.append(together / before)
            before = together


def _dot(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


class _Calibration:
    """P(a draft token stands | all before it stood) by the draft's confidence in it, decayed, of one source."""

    def __init__(self) -> None:
        self._stood, self._tested = [0.0] * (len(CONFIDENCES) + 1), [0.0] * (len(CONFIDENCES) + 1)

    @property
    def empty(self) -> bool:
        """Whether no confidence was ever told."""
        return not any(self._tested)

    def observe(self, confidence: float, stood: bool) -> None:
        """Learn what became of one tested token."""
        index, keep = bisect_right(CONFIDENCES, confidence), 1 - 1 / CONFIDENCE_LIFE
        self._stood[index] = self._stood[index] * keep + stood
        self._tested[index] = self._tested[index] * keep + 1

    def rate(self, confidence: float, prior: float) -> float:
        """Return the probability, near `prior` where little is known."""
        index = bisect_right(CONFIDENCES, confidence)
        return (self._stood[index] + CONFIDENCE_PRIOR * prior) / (self._tested[index] + CONFIDENCE_PRIOR)


@dataclass
class _Record:
    """What is known of one source.

    Attributes:
        unused: time, in plain steps, since it was last drafted from; infinite after a good probe.
        shallow: time since more was last drafted from it than planned.
        share: of the time, for probes.
    """

    acceptance: _Acceptance
    calibration: _Calibration = field(default_factory=_Calibration)
    unused: float = 0.0
    shallow: float = 0.0
    share: float = PROBE_SHARE


@dataclass(frozen=True)
class _Option:
    """A source in the coming round. `tokens[k]`: how many a round of k promises, 1 for k = 0."""

    source: Source
    record: _Record
    costs: DraftCosts
    tokens: list[float]


@dataclass
class _Round:
    """The round under way; without an option a plain step. `stands`: P(all its drafted tokens stand), calibrated."""

    option: _Option | None
    k: int
    rate: float
    probe: bool
    confidence: float = 1.0
    confidences: list[float] = field(default_factory=list)
    stands: float = 1.0
    rows: int = 0
    emitted: int = 0
    drafted: int = 0
