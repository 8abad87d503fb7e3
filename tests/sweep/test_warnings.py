"""Planted faults: a norm left out, exits that never agree, a clock that does not wait, and too little of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.sweep import timing, warnings
from selfspec_tune.sweep.candidates import Candidate, Trials, of_cell
from selfspec_tune.sweep.confirm import Confirmed, confirm
from selfspec_tune.sweep.head import ProfileHead
from selfspec_tune.sweep.objective import Cell, Costs
from selfspec_tune.sweep.processes import Processes
from selfspec_tune.sweep.profile import Prompt, profile_exits
from selfspec_tune.sweep.tally import Profile, PromptTally

GREEDY = SamplingParams()
MakeRequests = Callable[[int, int], list[Request]]


def make_decoder(late: float = 0.1) -> LayeredDecoder:
    """Five layers whose exits agree often; the final norm's weights vary widely, as those of trained models do."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
    model = tiny_model(num_hidden_layers=5, late=late, eos_token_id=None, pad_token_id=None, **sizes)
    model.model.norm.weight.data.normal_(0, 2, generator=torch.Generator().manual_seed(0))
    return LayeredDecoder(model)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(make_decoder(), numerics="fast")


def profiled(engine: Engine, requests: list[Request]) -> Profile:
    return profile_exits(engine, [Prompt(request) for request in requests], GREEDY, 3)


def enough_prompts(profile: Profile) -> Profile:
    return Profile(profile.num_layers, list(profile.tallies) * warnings.ADVISED_PROMPTS)


def test_nothing_is_said_where_all_is_well(engine: Engine, make_requests: MakeRequests) -> None:
    profile = profiled(engine, make_requests(2, 30))
    assert profile.alpha[4] > 0.5
    assert warnings.of_profile(enough_prompts(profile), approximate=False) == []


def test_few_prompts_and_reference_answers_are_named(engine: Engine, make_requests: MakeRequests) -> None:
    few, approximate = warnings.of_profile(profiled(engine, make_requests(2, 30)), approximate=True)
    assert few.startswith("only 2 prompts were profiled: 200 to 500 are advised")
    assert approximate.startswith("approximate: reference answers")


def test_a_profile_without_the_final_norm_is_caught(
    engine: Engine, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(2, 30)
    assert profiled(engine, requests).own == 1
    monkeypatch.setattr(ProfileHead, "rows", lambda _, hidden: hidden.float())
    profile = profiled(engine, requests)
    assert profile.own < warnings.LEAST_OWN
    [line] = warnings.of_profile(enough_prompts(profile), approximate=False)
    assert line.startswith("check the norm: behind the last layer the head chooses")


def test_exits_that_never_agree_are_named() -> None:
    tallies = [PromptTally("a", "", 101, 60.0, 100, [1.0, 2.0], [[99.0] * 2], [[100.0] * 2], own=100.0)] * 200
    [line] = warnings.of_profile(Profile(3, tallies), approximate=False)
    assert line.startswith("check the norm: even exit 2 of 3 has α = 0.02")


def test_rounding_is_not_called_a_missing_norm() -> None:
    tally = PromptTally("a", "", 101, 60.0, 100, [70.0, 80.0], [[50.0] * 2], [[100.0] * 2], own=94.0)
    assert warnings.of_profile(Profile(3, [tally] * 200), approximate=False) == []
    assert len(warnings.of_profile(Profile(3, [replace(tally, own=86.0)] * 200), approximate=False)) == 1


def layer_skip(alpha: float) -> Candidate:
    """Layer skip at exit 3, which promises to pay: a draft step costs a fifth of a plain one."""
    one, all_ = (dict.fromkeys(range(1, 5), seconds) for seconds in (0.1, 1.0))
    costs = Costs(5, plain=1.0, one_layer=one, all_layers=all_, embed=0, draft_head=0, verify_heads=dict(one))
    cell = Cell(3, 3, alpha, 0.2, 1.0, 2.5, 1.5, 1.5)
    return of_cell(cell, costs, 3)


@pytest.mark.parametrize("norm", [True, False], ids=["with the norm", "without the norm"])
def test_a_drafter_without_the_final_norm_is_caught_by_decoding(
    norm: bool, engine: Engine, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy soon leaves a drafter that fails, so there are few tested tokens to tell by."""
    requests = make_requests(6, 64)
    candidate = layer_skip(profiled(engine, requests).alpha[3])
    assert candidate.alpha is not None and candidate.alpha > 0.4

    def without(self: LayerSkipDrafter, adapted: Tensor) -> Tensor:
        return torch.nn.functional.linear(adapted, self.decoder.head[0]).float()

    if not norm:
        monkeypatch.setattr(LayerSkipDrafter, "logits", without)
    trials = Trials(engine, "", SweepConfig(max_draft_tokens=3), None, 64, Processes())  # type: ignore[arg-type]
    results = confirm(trials, requests, GREEDY, [candidate])
    assert results[0].identical and results[0].alpha is not None and results[0].num_tested > 10
    lines = warnings.of_confirmed([candidate], results)
    if norm:
        assert lines == []
    else:
        assert results[0].alpha < candidate.alpha / 2
        assert len(lines) == 1
        assert lines[0].startswith(f"check the norm: {candidate.label} was accepted with α = {results[0].alpha:.2f}")


def confirmed(label: str, alpha: float | None, num_tested: int) -> Confirmed:
    return Confirmed(label, 1.0, 0.9, 0.1, True, 1.1, 0.5, 6, 300, alpha, num_tested)


def test_chance_and_other_drafters_are_not_called_a_fault() -> None:
    skip = layer_skip(0.6)
    copy = replace(skip, settings=DraftSettings("copy"))
    assert len(warnings.of_confirmed([skip], [confirmed(skip.label, 0.2, 40)])) == 1
    assert warnings.of_confirmed([skip], [confirmed(skip.label, 0.2, 5)]) == []
    assert warnings.of_confirmed([skip], [confirmed(skip.label, 0.4, 4000)]) == []
    assert warnings.of_confirmed([skip], [confirmed(skip.label, None, 0)]) == []
    assert warnings.of_confirmed([copy], [confirmed(copy.label, 0.0, 40)]) == []


class FakeDevice:
    """A device that is given work and does it only when waited for; the clock stands still meanwhile."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def give(self, seconds: float) -> None:
        self.now, self.queued = self.now + 1e-6, self.queued + seconds

    def wait(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


class FakeBench(timing.Bench):
    """The pieces as they are named and ordered, but queueing seconds: a layer takes 1, the head `head`."""

    def __init__(self, device: FakeDevice, decoder: LayeredDecoder, head: float) -> None:
        super().__init__(decoder, GREEDY, 16, 3)
        self.device, self.head = device, head

    def run_layers(self, rows: int, count: int) -> Tensor:
        self.device.give(count)
        return self.hidden

    def draft_head(self) -> Tensor:
        self.device.give(self.head)
        return self.tokens

    def verify_head(self, rows: int) -> tuple[Tensor, Tensor]:
        self.device.give(self.head)
        self.device.wait()  # its result is read
        return self.tokens, self.tokens

    def plain_step(self) -> tuple[Tensor, Tensor]:
        self.run_layers(1, self.decoder.num_layers)
        return self.verify_head(1)


def measured(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, waits: bool, head: float) -> Costs:
    device = FakeDevice()
    with torch.inference_mode():
        pieces = FakeBench(device, engine.decoder, head).pieces()
        pieces["embed"] = lambda: device.give(0.01)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now)
        monkeypatch.setattr(timing, "synchronise", device.wait if waits else lambda: None)
        samples = timing.sample_in_turn(pieces, 4)
    names = {r: (f"one layer, {r} rows", f"all layers, {r} rows", f"verify head, {r} rows") for r in range(1, 5)}
    return Costs.of_samples(samples, names, num_layers=5, context_length=16)


@pytest.mark.parametrize("head", [0.1, 1.0, 5.0], ids=["small head", "usual head", "large head"])
def test_a_clock_that_does_not_wait_for_the_device_is_caught(
    head: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measured(engine, monkeypatch, waits=True, head=head)
    assert (right.plain, right.one_layer[2], right.all_layers[3]) == pytest.approx((5 + head, 1, 5), abs=1e-4)
    assert (right.embed, right.draft_head, right.verify_heads[4]) == pytest.approx((0.01, head, head), abs=1e-4)
    assert warnings.of_costs([right], undecided(1.1, 1.2), (0.0, 0.0)) == []
    wrong = measured(engine, monkeypatch, waits=False, head=head)
    assert not warnings.COMPOSED[0] <= wrong.composed_over_measured <= warnings.COMPOSED[1]
    [line] = warnings.of_costs([wrong], undecided(1.1, 1.2), (0.0, 0.0))
    assert "clock did not wait for the device" in line and "at 16 tokens, batch 1" in line


def undecided(low: float, high: float) -> Cell:
    return Cell(3, 2, 0.5, 0.4, 1.0, 1.75, 1.0, 1.0, (low, high))


def costs_of(plain: Sequence[float]) -> Costs:
    table = {1: 0.5}
    return Costs(5, 1.0, table, table, 0.0, 0.5, table, samples={"plain": plain}, context_length=128)


def test_noisy_costs_are_named() -> None:
    quiet, noisy = costs_of([0.99, 1.0, 1.0, 1.01]), costs_of([0.7, 0.9, 1.1, 1.3])
    [line] = warnings.of_costs([quiet, noisy], undecided(1.1, 1.2), (0.0, 0.0))
    assert line.startswith("costs are noisy at 128 tokens, batch 1: the plain step spreads by 30%")


@pytest.mark.parametrize(
    ("parts", "start", "cure"),
    [
        ((0.3, 0.1), "the spread of the costs cannot decide", "more --repeats, or a quiet machine would"),
        ((0.1, 0.3), "so few prompts cannot decide", "more --num-prompts would"),
    ],
)
def test_an_undecided_interval_names_the_wider_part(parts: tuple[float, float], start: str, cure: str) -> None:
    [line] = warnings.of_costs([], undecided(0.9, 1.2), parts)
    assert line.startswith(start) and "exit 3, k = 2" in line and "×0.90 to ×1.20" in line and line.endswith(cure)
    assert warnings.of_costs([], undecided(1.01, 1.2), parts) == []
    assert warnings.of_costs([], undecided(0.8, 0.99), parts) == []
