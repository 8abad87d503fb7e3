"""Is sampled text distributed as the target says? Tested on the real engine with the real drafters, in two ways.

Shared noise (`reproducible`): the text with speculation equals the text without, token for token.

Ratio test: the engine keeps the target's logits that every token was judged by. Let p be their distribution, and put
the tokens of the vocabulary in an order that is fixed before the token is drawn. With U uniform, the probability of the
tokens before the emitted one plus U times its own is uniform on [0, 1] and independent of the past if the token was
drawn from p (randomised probability integral transform, Rosenblatt 1952, Brockwell 2007). So these numbers of all
tokens of all texts are counted in 20 bins and tested by chi-square. An order sees what changes along it, so there are
two: by p, and by q/p at the positions that had a draft with distribution q. The first sees a draft drawn at another
temperature and a bonus token of another position, the second a draft accepted too often. A token of which p is 1 says
nothing and is left out, one of which p is 0 cannot occur, so a single one fails.

Power, measured on a tiny model of 64 tokens whose layer-skip draft (k of 1 and 3) has half of its tokens accepted, in
runs with 4 seeds: 768 tokens show a draft that is always accepted and a bonus token of another position every time, a
rejection drawn from p and a draft at 0.6 of the temperature in 3 runs of 4, q taken before truncation in none; 1,536
show all of these every time. A residual that is not clipped needs 3,072 (1,536: 2 of 4). A draft that is accepted more
often needs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import Noise, SamplingParams, distribution, draw_with_gumbel
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.progress import Progress, silent
from selfspec_tune.regress.lossless import TIE_TOLERANCE, count_differing

FALSE_ALARM = 1e-4
"""Probability that a run of the ratio test fails although nothing is wrong, over all its chi-square tests."""
ORDERS = ("probability", "draft")
BINS = 20
LEAST_TOKENS = 20 * BINS
"""Below it the distribution of the statistic is not near enough to chi-square's that far out."""
EDGE = 1e-5
"""Share of top_p within which rounding may decide which token is the last to be kept."""


@dataclass(frozen=True)
class NoiseDifference:
    """The first place where a text with shared noise differs from the one without speculation.

    Attributes:
        prompt: the request's id.
        position: index of the emitted token, 0 for the first after the prompt.
        plain_token, speculative_token: the tokens there; None where one of the texts had ended.
        rounding: whether the token is right for logits that differ from plain decoding's by no more than
            `TIE_TOLERANCE` at both tokens. Excused in fast numerics.
    """

    prompt: str
    drafter: str
    num_draft_tokens: int
    position: int
    plain_token: int | None
    speculative_token: int | None
    rounding: bool


@dataclass
class SharedNoise:
    """Texts with shared noise against plain ones, of one drafter and draft length."""

    drafter: str
    num_draft_tokens: int
    tokens: int = 0
    """Tokens of plain decoding compared."""
    drafted: int = 0
    accepted: int = 0
    differing_tokens: int = 0
    differing_texts: int = 0
    rounding: int = 0
    """Texts that differ, but by rounding first."""


@dataclass
class RatioTest:
    """Uniformity of one drafter's texts in one order, all draft lengths together."""

    drafter: str
    order: str
    counts: list[int] = field(default_factory=lambda: [0] * BINS)

    @property
    def tokens(self) -> int:
        """Tokens tested."""
        return sum(self.counts)

    @property
    def p_value(self) -> float | None:
        """Probability of counts this uneven if nothing is wrong; None for less than `LEAST_TOKENS`."""
        return chi_square_p_value(self.counts) if self.tokens >= LEAST_TOKENS else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"drafter": self.drafter, "order": self.order, "tokens": self.tokens, "p_value": self.p_value}


@dataclass
class Sampling:
    """What the test of sampling found."""

    numerics: str
    dtype: str
    temperature: float
    top_k: int
    top_p: float
    prompts: int
    texts_per_prompt: int
    drafters: list[str]
    num_draft_tokens: list[int]
    shared_noise: list[SharedNoise]
    ratio_test: list[RatioTest]
    drafted: int = 0
    accepted: int = 0
    """Draft tokens accepted by the ratio test."""
    impossible_tokens: int = 0
    """Emitted although the target's probability is 0."""
    first_difference: NoiseDifference | None = None

    @property
    def threshold(self) -> float:
        """The p-value below which one chi-square test fails."""
        return FALSE_ALARM / len(self.ratio_test)

    @property
    def status(self) -> str:
        """passed or failed; too few tokens for the ratio test's chi-square are no failure, and are told."""
        values = [test.p_value for test in self.ratio_test]
        excused = self.numerics == "fast"
        differing = sum(cell.differing_texts - excused * cell.rounding for cell in self.shared_noise)
        if differing or self.impossible_tokens or any(p is not None and p < self.threshold for p in values):
            return "failed"
        return "passed"

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        tests = [test.to_dict() for test in self.ratio_test]
        verdict = {"status": self.status, "passed": self.passed, "threshold": self.threshold}
        return asdict(self) | {"ratio_test": tests} | verdict


def check_sampling(
    engine: Engine,
    requests: Sequence[Request],
    drafters: Mapping[str, Drafter],
    num_draft_tokens: Sequence[int],
    params: SamplingParams,
    *,
    texts_per_prompt: int,
    progress: Progress = silent,
) -> Sampling:
    """Sample with speculation, with shared noise and by the ratio test, and test both.

    Args:
        engine: made with `keep_logits=True`.
        requests: prompts; each text is a batch of its own. Memory: max_new_tokens · V fp32 numbers, twice.
        drafters: label → what drafts.
        num_draft_tokens: draft lengths, each tested with every drafter.
        params: temperature above 0; both kinds of acceptance are tested whatever `reproducible` says.
        texts_per_prompt: texts of the ratio test for each prompt, drafter and draft length, each with noise of its own.
            With shared noise it is one.
        progress: told after every text.

    Raises:
        UserError: greedy, an impossible draft length, or a request the engine refuses.
    """
    if not engine.keep_logits:
        raise ValueError("the engine must keep the logits")
    if params.greedy:
        raise UserError("sampling is tested at a temperature", got="temperature 0 (greedy)", allowed="above 0")
    if texts_per_prompt < 1:
        raise UserError("texts_per_prompt is out of range", got=texts_per_prompt, allowed="1 or more")
    for k in num_draft_tokens:
        if not 1 <= k <= MAX_DRAFT_TOKENS:
            raise UserError("num_draft_tokens is out of range", got=k, allowed=f"1..{MAX_DRAFT_TOKENS}")
    result = Sampling(
        numerics=engine.numerics,
        dtype=str(engine.decoder.dtype).removeprefix("torch."),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompts=len(requests),
        texts_per_prompt=texts_per_prompt,
        drafters=list(drafters),
        num_draft_tokens=list(num_draft_tokens),
        shared_noise=[SharedNoise(label, k) for label in drafters for k in num_draft_tokens],
        ratio_test=[RatioTest(label, order) for label in drafters for order in ORDERS],
    )
    _shared_noise(engine, requests, drafters, replace(params, reproducible=True), result, progress)
    _ratio_test(engine, requests, drafters, replace(params, reproducible=False), result, progress)
    return result


def chi_square_p_value(counts: Sequence[int]) -> float:
    """Return the probability of counts at least this uneven if all bins are equally likely (chi-square)."""
    expected = sum(counts) / len(counts)
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def mass_before(p: Tensor, token: int, q: Tensor | None = None) -> float:
    """Return the probability of the tokens that come before `token`, the largest p or, given q, the largest q/p first.

    Args:
        p, q: [V]. Equal q/p: the larger p is first; equal p: the smaller id.
    """
    earlier = torch.arange(len(p), device=p.device) < token
    before = (p > p[token]) | ((p == p[token]) & earlier)
    if q is not None:
        ratio = torch.where(p > 0, q / p, 0)
        before = (ratio > ratio[token]) | ((ratio == ratio[token]) & before)
    return float(p[before].sum())


class _Watched(Drafter):
    """A drafter, and for each token of row 0 the draft and the offset in it that the token was judged against."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.exit_layer = drafter, drafter.name, drafter.exit_layer
        self.judged: list[tuple[Draft, int] | None] = []
        self._draft: Draft | None = None

    def start(self, texts: list[list[int]]) -> None:
        self.judged, self._draft = [], None
        self.drafter.start(texts)

    def extend(self, row: int, tokens: list[int]) -> None:
        if row == 0:
            draft, self._draft = self._draft, None
            k = draft.tokens.shape[1] if draft is not None else 0
            self.judged += [(draft, at) if draft is not None and at < k else None for at in range(len(tokens))]
        self.drafter.extend(row, tokens)

    def parts(self) -> list[Drafter]:
        return self.drafter.parts()

    def sources(self) -> list[Source]:
        return self.drafter.sources()

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        self._draft = self.drafter.propose(last, cache, k, choose, source, enough)
        return self._draft


def _shared_noise(
    engine: Engine,
    requests: Sequence[Request],
    drafters: Mapping[str, Drafter],
    params: SamplingParams,
    result: Sampling,
    progress: Progress,
) -> None:
    total = len(requests) * len(result.shared_noise)
    for number, request in enumerate(requests):
        [plain], _ = engine.generate([request], params)
        for done, cell in enumerate(result.shared_noise, start=1):
            drafter, policy = drafters[cell.drafter], DraftPolicy(cell.num_draft_tokens)
            [speculative], stats = engine.generate([request], params, drafter, policy)
            cell.tokens += len(plain.token_ids)
            cell.drafted += stats.drafted
            cell.accepted += stats.accepted
            difference = _first_difference(engine, params, plain, speculative, cell)
            if difference is not None:
                cell.differing_tokens += count_differing(plain.token_ids, speculative.token_ids)
                cell.differing_texts += 1
                cell.rounding += difference.rounding
                known = result.first_difference
                if known is None or (known.rounding and not difference.rounding):
                    result.first_difference = difference
            progress("sampling with shared noise", number * len(result.shared_noise) + done, total)


def _first_difference(
    engine: Engine, params: SamplingParams, plain: Completion, speculative: Completion, cell: SharedNoise
) -> NoiseDifference | None:
    ours, theirs = plain.token_ids, speculative.token_ids
    if ours == theirs:
        return None
    common = min(len(ours), len(theirs))
    position = next((place for place in range(common) if ours[place] != theirs[place]), common)
    tokens = [text[position] if position < len(text) else None for text in (ours, theirs)]
    rounding = False
    if position < common:
        logits = speculative.logits[position].float()
        noise = Noise(params, plain.id).gumbel(position, len(logits)).to(logits.device)
        right = int(draw_with_gumbel(distribution(logits, params), noise)) == theirs[position]
        moved = (logits - plain.logits[position].float()).abs()[[ours[position], theirs[position]]]
        rounding = right and float(moved.max()) < TIE_TOLERANCE[engine.decoder.dtype]
    return NoiseDifference(plain.id, cell.drafter, cell.num_draft_tokens, position, tokens[0], tokens[1], rounding)


def _ratio_test(
    engine: Engine,
    requests: Sequence[Request],
    drafters: Mapping[str, Drafter],
    params: SamplingParams,
    result: Sampling,
    progress: Progress,
) -> None:
    tests = {(test.drafter, test.order): test for test in result.ratio_test}
    ranks = Noise(params, "ranks within a token's own probability")
    texts = [
        (label, k, replace(request, id=f"{request.id} {label} {k} {number}"))
        for label in drafters
        for k in result.num_draft_tokens
        for request in requests
        for number in range(result.texts_per_prompt)
    ]
    for done, (label, k, request) in enumerate(texts, start=1):
        watched = _Watched(drafters[label])
        [completion], stats = engine.generate([request], params, watched, DraftPolicy(k))
        result.drafted += stats.drafted
        result.accepted += stats.accepted
        for order, place in _places(completion, watched, params, ranks):
            if order is None:
                result.impossible_tokens += 1
            else:
                tests[label, order].counts[place] += 1
        progress("sampling by the ratio test", done, len(texts))


def _places(
    completion: Completion, watched: _Watched, params: SamplingParams, ranks: Noise
) -> Iterable[tuple[str | None, int]]:
    """Yield (order, bin) for every token and order; (None, 0) for a token that cannot occur."""
    wider = replace(params, top_p=min(1.0, params.top_p * (1 + EDGE)))
    for token, logits, judged in zip(completion.token_ids, completion.logits, watched.judged, strict=False):
        p = distribution(logits, params).double()
        own = float(p[token])
        if own == 0 and distribution(logits, wider)[token] == 0:
            yield None, 0
        if own in (0, 1):
            continue
        rank = float(ranks.uniform(1)) * own
        total = float(p.sum())
        yield "probability", _bin((mass_before(p, token) + rank) / total)
        if judged is not None:
            draft, offset = judged
            if draft.probabilities is not None:
                q = draft.probabilities[0, offset].double()
            else:
                q = torch.nn.functional.one_hot(draft.tokens[0, offset], len(p)).double()
            yield "draft", _bin((mass_before(p, token, q) + rank) / total)


def _bin(value: float) -> int:
    return min(int(value * BINS), BINS - 1)
