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
MARGIN = 3.0
"""Standard errors by which the mean must lie below what pays: a draft that does pay is stopped about once in a
thousand runs, one that is far from paying after the first `LEAST_ROUNDS` rounds."""
WINDOW = 64
"""Tested draft tokens from which `WindowPolicy` judges."""
RAISE_ABOVE, LOWER_BELOW = 0.85, 0.70
"""Acceptance in the window from which k grows, and shrinks."""
DEFAULT_ALPHA = 0.5
"""Acceptance of a drafter nothing is known about."""
FAST_LIFE, SLOW_LIFE = 10.0, 150.0
"""Tested tokens that the two memories of acceptance reach back."""
PRIOR_WEIGHT, NEIGHBOUR_WEIGHT = 6.0, 3.0
"""Weight, in tested tokens, of α in the slow memory and of the slow memory in the fast one; and of the acceptance of
one position in the next one's."""
SWITCHING = 0.05
"""Least belief in either memory: how soon the other can take over."""
CONFIDENCES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Edges of the bins in which a draft's confidence in one token is calibrated."""
CONFIDENCE_LIFE, CONFIDENCE_PRIOR = 64.0, 6.0
"""Tested tokens that a bin remembers, and the weight in tokens of the position's acceptance against them."""
PURSE, TRICKLE = 2.5, 0.005
"""Plain steps that drafting may lose at first, and how many more per plain step's worth of time."""
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
        """Learn that of k tokens drafted from `source` so many were accepted; once per row of a round."""


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
    - *Purse*: what rounds gained over plain decoding, plus `PURSE` steps, plus `TRICKLE` of the time. No round is
      taken that could lose more. So whatever a draft does, n tokens take at most (n + PURSE)/(1 − TRICKLE) steps.

    In a batch one plan serves all rows, and what a round emitted is the mean over them.

    Args:
        costs: by drafter; sources of a drafter without costs are not used.
        alphas: acceptance to start from, by drafter.
        k_max: most draft tokens per round.
    """

    wants_confidence = True

    def __init__(
        self,
        costs: Mapping[str, DraftCosts],
        alphas: Mapping[str, float] | None = None,
        k_max: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self.k = min(k_max, MAX_DRAFT_TOKENS)
        self._costs, self._alphas = dict(costs), dict(alphas or {})
        self._records: dict[tuple[str, str], _Record] = {}
        self._purse = PURSE
        self._round: _Round | None = None

    def next(self, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
        """Return the plan with the best rate, or a probe that is due; None to take a plain step."""
        self._settle()
        options = [self._option(source, remaining) for source in sources if source.drafter in self._costs]
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
        self._round = _Round(best, best_k, rate, probe is not None)
        return (best.source, best_k) if best is not None else None

    def enough(self, source: Source, confidence: float) -> bool:
        """Whether one more token promises less than the planned rate times what it costs."""
        now = self._round
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
        record, now = self._record(source), self._round
        if now is not None and now.option is not None and now.option.source == source:
            now.rows, now.emitted, now.drafted = now.rows + 1, now.emitted + accepted + 1, k
            for position, confidence in enumerate(now.confidences[: min(k, accepted + 1)]):
                record.calibration.observe(confidence, position < accepted)
        record.acceptance.observe(k, accepted)

    def _settle(self) -> None:
        """Account for the round that `next` planned last."""
        now, self._round = self._round, None
        if now is None or (now.option is not None and now.rows == 0):
            return
        emitted = now.emitted / now.rows if now.option else 1.0
        cost = now.option.costs.round(now.drafted) if now.option else 1.0
        self._purse += emitted - cost + TRICKLE * cost
        for record in self._records.values():
            record.unused += cost
            record.shallow += cost
        if now.option is None:
            return
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
        """Whether the purse allows a round of k tokens, of which all may be rejected."""
        return k < len(option.tokens) and option.costs.round(k) - 1 <= self._purse

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
    """`rates`: P(the draft token at a position stands | all before it in its round stood), of one source, decayed.

    Two memories: a slow one in which each position forgets by its own tests, and a fast one in which all forget
    together. A position seldom reached takes after the one before it; the fast memory takes after the slow one, that
    after α. Which is believed how much follows from how well either foretold the latest tokens (a fixed share,
    Herbster and Warmuth 1998), so steady text is measured well and a change is noticed within a few rounds.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha, self._trust = min(max(alpha, 0.02), 0.98), 0.5
        # [stood, tested] by position.
        self._fast = [(0.0, 0.0)] * MAX_DRAFT_TOKENS
        self._slow = [(0.0, 0.0)] * MAX_DRAFT_TOKENS
        self._estimate()

    def observe(self, k: int, accepted: int) -> None:
        """Learn from a round of k tokens: `accepted` stood, the one after them, if any, did not."""
        tested = min(k, accepted + 1)
        kept = (1 - 1 / FAST_LIFE) ** tested
        self._fast = [(stood * kept, seen * kept) for stood, seen in self._fast]
        for position in range(tested):
            stood = position < accepted
            fast, slow = self._foretold[position] if stood else (1 - rate for rate in self._foretold[position])
            trust = self._trust * fast / (self._trust * fast + (1 - self._trust) * slow)
            self._trust = trust + SWITCHING * (1 - 2 * trust)
            kept = 1 - 1 / SLOW_LIFE
            self._slow[position] = (self._slow[position][0] * kept + stood, self._slow[position][1] * kept + 1)
            self._fast[position] = (self._fast[position][0] + stood, self._fast[position][1] + 1)
        self._estimate()

    def _estimate(self) -> None:
        fast, slow, foretold = 0.0, self._alpha, []
        for position, ((quick, recent), (steady, tested)) in enumerate(zip(self._fast, self._slow, strict=True)):
            weight = NEIGHBOUR_WEIGHT if position else PRIOR_WEIGHT
            slow = (steady + weight * slow) / (tested + weight)
            prior = (slow + fast) / 2 if position else slow
            fast = (quick + PRIOR_WEIGHT * prior) / (recent + PRIOR_WEIGHT)
            foretold.append((fast, slow))
        self._foretold = foretold
        self.rates = [self._trust * fast + (1 - self._trust) * slow for fast, slow in foretold]


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
