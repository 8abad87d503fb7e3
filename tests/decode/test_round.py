"""Rounds as the device sees them: fixed shapes, nothing read on the host, launched before the last one was read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import END, byte_tokenizer, tiny_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec_tune.decode import rounds as rounds_module
from selfspec_tune.decode import sampling
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import CostPolicy, DraftCosts, DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.round import Outcome
from selfspec_tune.decode.rounds import Rounds
from selfspec_tune.decode.run import Run
from selfspec_tune.decode.sampling import Noise, SamplingParams
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.exit_head import ExitHead

GREEDY = SamplingParams()
K = 3
SOME = torch.tensor([*range(0, END, 2)])
DRAFTERS: dict[str, Callable[[LayeredDecoder], Drafter | None]] = {
    "none": lambda decoder: None,
    "layer-skip": lambda decoder: LayerSkipDrafter(decoder, 2),
    "layer-skip, some tokens": lambda decoder: LayerSkipDrafter(decoder, 2, SOME),
    "exit-head": lambda decoder: ExitHeadDrafter(decoder, ExitHead(decoder.model, 3, decoder.dtype)),
    "low-precision": lambda decoder: LowPrecisionDrafter(decoder, 8),
}
# Not numpy, which a CUDA tensor refuses anyway: the compiled ops of CPUs keep a table of addresses in a tensor.
READ_ON_THE_HOST = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__,
}  # fmt: skip
# Their results' shapes depend on what tensors hold.
OF_UNKNOWN_SHAPE = {"nonzero", "masked_select", "unique_dim", "_unique2", "_local_scalar_dense", "repeat_interleave"}


class HostReads(TorchFunctionMode):
    """Fails where Python reads a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_ON_THE_HOST:
            raise AssertionError(f"the host reads a tensor: {func.__name__}")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Writes down every operation with the shapes of what it takes and makes; fails where a shape is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        booleans = [i for i in _tensors(args) if i.dtype == torch.bool]
        if name in OF_UNKNOWN_SHAPE or (name in ("index", "index_put_") and len(booleans) > 0):
            raise AssertionError(f"the host must know what a tensor holds: {name}")
        result = func(*args, **(kwargs or {}))
        self.seen.append((name, [tuple(each.shape) for each in (*_tensors(args), *_tensors(result))]))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def operations(call: Callable[[], object]) -> list[Any]:
    """Return what a call does on the device, which must not read anything on the host."""
    with HostReads(), Operations() as found:
        call()
    return found.seen


@pytest.fixture(scope="module")
def decoder() -> LayeredDecoder:
    model = tiny_model(late=0.2)
    with torch.no_grad():
        model.lm_head.weight[END:] *= 1e-3
    return LayeredDecoder(model)


def prefilled(engine: Engine, params: SamplingParams, drafter: Drafter | None) -> Rounds:
    """Return rounds of two rows of unlike length, ready for the first one, as a run on a GPU makes them."""
    texts = [list(range(20, 45)), list(range(60, 70))]
    engine.claim_decoder()
    rounds = engine.rounds_for(400, params)
    rounds.start(drafter)
    rounds.noises.start([Noise(params, name) for name in "ab"], lambda row: 0)
    rounds.round.uniform = rounds.noises.prepared
    if drafter is not None:
        drafter.start(texts)
    rounds.noises.prepare(2 * K + 1)
    for row, text in enumerate(texts):
        hidden = engine.decoder.prefill(torch.tensor([text]), rounds.cache.row(row))
        rounds.round.choose_first(engine.decoder.logits(hidden, pad=False)[0], row)
    rounds.activate([0, 1])
    rounds.cache.expected = 390
    return rounds


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(0.8), SamplingParams(0.8, top_k=9), SamplingParams(0.8, top_p=0.9)],
    ids=["greedy", "sampled", "top-k", "top-p"],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_reads_nothing_on_the_host_and_never_changes_its_shapes(decoder, name, params, monkeypatch):
    """Forty rounds, across a block's edge, with rows that accept unlike numbers of tokens.

    top-p looks on CPUs for a small nucleus first; what runs here is what runs on a GPU.
    """
    monkeypatch.setattr(sampling, "NUCLEI", ())
    drafter = DRAFTERS[name](decoder)
    engine = Engine(decoder, batch_size=2)
    counts, done = set(), []
    with torch.inference_mode():
        rounds = prefilled(engine, params, drafter)

        def run() -> Outcome:
            draft = None
            if drafter is not None:
                draft = rounds.round.draft(drafter, drafter.sources()[0], K, lambda: False, confident=False)
            outcome.append(rounds.round.finish(draft))
            return outcome[-1]

        for _ in range(40):
            outcome: list[Outcome] = []
            rounds.noises.prepare(2 * K + 1)
            done.append(operations(run))
            counts |= set(outcome[0].numbers[:, -3].tolist())
    # The first round makes tables that stay.
    assert len(done[1]) > 5 and all(each == done[1] for each in done[1:])
    assert counts == {0} if drafter is None else len(counts) > 1


def test_asking_how_sure_a_draft_is_reads_on_the_host(decoder):
    """So the watch sees what it is there for."""
    drafter = LayerSkipDrafter(decoder, 2)
    engine = Engine(decoder, batch_size=2)
    with torch.inference_mode():
        rounds = prefilled(engine, GREEDY, drafter)
        enough = lambda: float(rounds.round.confidence.mean()) < 0  # noqa: E731
        with pytest.raises(AssertionError, match="the host reads"):
            operations(lambda: rounds.round.draft(drafter, drafter.sources()[0], K, enough, confident=True))


def test_without_compiled_passes_the_host_looks_at_positions(decoder, reference_ops):
    with torch.inference_mode():
        rounds = prefilled(Engine(decoder, batch_size=2), GREEDY, None)
        with pytest.raises(AssertionError, match="the host reads"):
            operations(lambda: rounds.round.finish(None))


def requests(count: int, length: int = 40, stop: tuple[str, ...] = ()) -> list[Request]:
    """Requests that repeat themselves, so that there is something to copy."""
    texts = [[(7 * row + 3 * (at % 6)) % 200 + 20 for at in range(12 + 5 * row)] for row in range(count)]
    return [Request(f"r{row}", text, length + 3 * row, stop) for row, text in enumerate(texts)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_launched_ahead_give_the_same_text(decoder, name, batch, monkeypatch):
    """Cut by length, and by an end token that the host sees only when the next round is under way."""
    launched = []
    genuine = Run._launch
    monkeypatch.setattr(Run, "_launch", lambda run, rounds: (launched.append(1), genuine(run, rounds))[1])
    free = None
    for ends in ((), None):
        if ends is None:
            ends = tuple(completion.token_ids[14] for completion in free)
        texts = []
        for ahead in (False, True):
            engine = Engine(decoder, end_tokens=ends, batch_size=batch, keep_logits=True, ahead=ahead)
            drafter = DRAFTERS[name](decoder)
            launched.clear()
            completions, stats = engine.generate(requests(batch), GREEDY, drafter, DraftPolicy(K if drafter else 0))
            texts.append(completions)
            dropped = len(launched) - stats.passes
            # A plain step emits one token, so where a length ends the text the host knows when to stop.
            assert dropped == 0 if not ahead or (drafter is None and not ends) else dropped in (0, 1)
        for plain, early in zip(*texts, strict=True):
            assert (plain.token_ids, plain.finish_reason) == (early.token_ids, early.finish_reason)
            assert all(torch.equal(a, b) for a, b in zip(plain.logits, early.logits, strict=True))
        free = texts[0]
    assert dropped == 1 or drafter is not None, "a step was under way when the last row ended"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_finished_row_stays_where_it_is_while_others_go_on(decoder, ahead):
    """Else its positions would leave the rotary tables."""
    short, long = requests(2)
    pair = [replace(short, max_new_tokens=5), replace(long, max_new_tokens=120)]
    engine = Engine(decoder, batch_size=2, ahead=ahead)
    engine.generate(pair, GREEDY, LayerSkipDrafter(decoder, 3), DraftPolicy(K))
    end = len(short.prompt_ids) + 5
    assert end - 1 <= int(engine._cache.committed[0]) <= end + (1 + ahead) * (K + 1)


def test_a_finished_row_drafts_within_the_slots_that_were_reserved():
    """Row 0 ends near a block's edge, with all drafts accepted; in a run ahead nothing may grow the cache."""
    decoder = LayeredDecoder(tiny_model(late=0.0))
    drafter = LayerSkipDrafter(decoder, 3)
    for length in range(96, 112):
        texts = [[(7 * at) % 200 + 20 for at in range(length)], [30, 31, 32]]
        pair = [Request("a", texts[0], 5), Request("b", texts[1], 60)]
        engine = Engine(decoder, batch_size=2, ahead=True)
        engine.generate(pair, GREEDY, drafter, DraftPolicy(8))


class Shown:
    """Keeps what is streamed."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def __call__(self, row: int, text: str) -> None:
        self.parts.append(text)


def test_streamed_text_and_stop_strings_are_the_same_ahead(decoder):
    texts = []
    for ahead in (False, True):
        engine = Engine(decoder, byte_tokenizer(), ahead=ahead)
        free = engine.generate(requests(1), GREEDY)[0][0].text
        stop = next(free[i : i + 2] for i in range(6, 30) if free[i : i + 2].isascii() and free[i : i + 2].strip())
        drafter = LayerSkipDrafter(decoder, 3)
        shown = Shown()
        [completion], _ = engine.generate(requests(1, stop=(stop,)), GREEDY, drafter, DraftPolicy(4), on_text=shown)
        assert "".join(shown.parts) == completion.text and completion.finish_reason == "stop"
        texts.append((completion.text, completion.token_ids))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("params", [SamplingParams(0.9, seed=4), SamplingParams(0.9, reproducible=True)])
def test_sampled_text_without_a_draft_is_the_same_ahead(decoder, params):
    texts = [Engine(decoder, batch_size=2, ahead=ahead).generate(requests(2), params)[0] for ahead in (False, True)]
    assert [each.token_ids for each in texts[0]] == [each.token_ids for each in texts[1]]


def test_a_draft_that_needs_the_text_is_not_launched_ahead(decoder):
    drafter = HybridDrafter(PromptLookupDrafter(), LayerSkipDrafter(decoder, 3))
    texts = []
    for ahead in (False, True):
        engine = Engine(decoder, ahead=ahead)
        completions, stats = engine.generate(requests(1, 60), GREEDY, drafter, DraftPolicy(4))
        texts.append((completions[0].token_ids, stats.accepted, stats.passes))
    assert texts[0] == texts[1]


class Watched(LayerSkipDrafter):
    """Wants to see every round, as what a gate looks through does: its rounds must run, not be replayed."""

    reads_text = True


class Rerun:
    """In place of CUDA graphs: runs every round as it is written, and notes of what kind it was."""

    kinds: list[Hashable]
    active = True

    def __init__(self) -> None:
        Rerun.kinds = []

    def run(self, kind: Hashable, body: Callable[[], Outcome]) -> Outcome:
        Rerun.kinds.append(kind)
        return body()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.9, top_k=20)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", "layer-skip", "layer-skip, watched", "copy", "hybrid"])
def test_rounds_as_they_are_recorded_give_the_same_text(decoder, name, params, monkeypatch):
    """With prepared random numbers and copied tokens in place, without a GPU; no policy asks how sure a draft is."""
    makers = DRAFTERS | {
        "layer-skip, watched": lambda decoder: Watched(decoder, 2),
        "copy": lambda decoder: PromptLookupDrafter(),
        "hybrid": lambda decoder: HybridDrafter(PromptLookupDrafter(), LayerSkipDrafter(decoder, 3)),
    }
    texts, settings = [], (requests(2, 60), params)
    for recorded in (False, True):
        if recorded:
            monkeypatch.setattr(rounds_module, "recordings", lambda decoder: Rerun())
        drafter = makers[name](decoder)
        engine = Engine(decoder, batch_size=2, ahead=False)
        completions, stats = engine.generate(*settings, drafter, DraftPolicy(K if drafter else 0))
        texts.append([each.token_ids for each in completions])
        assert drafter is None or stats.drafted > 0
    assert texts[0] == texts[1]
    seen = set(Rerun.kinds)
    assert seen <= {("plain", None)} if "watched" in name else len(Rerun.kinds) > len(seen) > 0


def test_nothing_is_recorded_where_that_is_not_wanted(decoder, monkeypatch):
    monkeypatch.setattr(rounds_module, "recordings", lambda decoder: Rerun())
    for record in (True, False):
        Rerun.kinds = []
        Engine(decoder, ahead=False, record=record).generate(requests(1, 9), GREEDY)
        assert bool(Rerun.kinds) == record


def test_rounds_are_kept_while_parameters_and_memory_are_the_same(decoder):
    engine = Engine(decoder)
    first = engine.rounds_for(100, GREEDY)
    assert engine.rounds_for(120, GREEDY) is first
    assert engine.rounds_for(120, SamplingParams(0.5)) is not first
    second = engine.rounds_for(120, GREEDY)
    assert engine.rounds_for(10_000, GREEDY) is not second, "the cache has moved"


def test_costs_are_learnt_from_the_round_that_was_observed():
    """Two rounds under way at once leave the purse as two rounds one after the other do."""
    source, purses = rounds_module.Source("layer-skip"), []
    for at_once in (False, True):
        policy = CostPolicy({"layer-skip": DraftCosts(0.1, (1.0,) * 8)}, {"layer-skip": 0.9})
        plans = [policy.next(1000, [source])]
        if at_once:
            plans.append(policy.next(1000, [source]))
        for index in range(2):
            if len(plans) == index:
                plans.append(policy.next(1000, [source]))
            policy.observe(source, 4, 1 + 2 * index)
            policy.settle()
        assert all(plan is not None for plan in plans)
        purses.append(policy._purses["layer-skip"])
    assert purses[0] == pytest.approx(purses[1])


def test_what_is_forgotten_is_not_accounted_for():
    source = rounds_module.Source("layer-skip")
    policy = CostPolicy({"layer-skip": DraftCosts(0.1, (1.0,) * 8)}, {"layer-skip": 0.9})
    before = dict(policy._purses)
    policy.next(1000, [source])
    policy.forget()
    policy.next(1000, [source])
    assert policy._purses == before
    policy.observe(source, 4, 2)
    policy.settle()
    assert not policy._rounds, "the round that was forgotten was taken for this one"
