"""Which cell is chosen, when speculation is enabled, and what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from selfspec_tune import artifact as artifacts
from selfspec_tune.cli import app
from selfspec_tune.cli.sweep_exit import check_options
from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftCosts
from selfspec_tune.decode.price import KnownCosts
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder, load_decoder
from selfspec_tune.sweep import confirm, decision, record, select
from selfspec_tune.sweep.candidates import Candidate, Trials
from selfspec_tune.sweep.confirm import Confirmed
from selfspec_tune.sweep.decision import Decision
from selfspec_tune.sweep.objective import Cell, Costs
from selfspec_tune.sweep.processes import Processes
from selfspec_tune.sweep.profile import Prompt
from selfspec_tune.sweep.tally import Profile, PromptTally

COSTS = Costs(
    num_layers=5,
    plain=100.0,
    one_layer={1: 10.0, 2: 10.0, 3: 10.0},
    all_layers={1: 50.0, 2: 50.0, 3: 50.0},
    embed=0.0,
    draft_head=10.0,
    verify_heads={1: 50.0, 2: 50.0, 3: 50.0},
    overhead=2.0,
)
MakeRequests = Callable[[int, int], list[Request]]


def cell(exit_layer: int, k: int, predicted: float) -> Cell:
    return Cell(exit_layer, k, 0.7, 0.3, 1.1, 2.0, 1.2, predicted)


def candidate(settings: DraftSettings, tokens: float, cost: float) -> Candidate:
    name = settings.drafter
    return Candidate(
        settings, 3, 0.7, 0.3, 1.1, 2.0, tokens, cost, KnownCosts({name: DraftCosts(0.3, (1.1, 1.2, 1.3))}, {name: 0.7})
    )


SKIP, COPY = DraftSettings("layer-skip", 2), DraftSettings("copy")
FOUR, EIGHT = DraftSettings("low-precision"), DraftSettings("low-precision", draft_bits=8)


def result(settings: DraftSettings, speedup: float, identical: bool | None = True) -> Confirmed:
    return Confirmed(settings.label, speedup, speedup - 0.01, 0.02, identical, 2.0, 0.9, 6, 300)


def decide(
    found: list[Candidate], confirmed: list[Confirmed], *, exact: bool = True, must_confirm: bool = True
) -> Decision:
    return decision.decide(found, confirmed, "α too low", exact=exact, must_confirm=must_confirm)


def test_every_cell_gets_both_scores() -> None:
    tally = PromptTally(
        "a", "", 11, 20.0, 10, [2.0, 5.0], [[10.0, 10.0], [10.0, 10.0]], [[12.0, 15.0], [12.0, 17.0]], 10.0
    )
    cells = select.score(Profile(3, [tally]), COSTS)
    assert [(c.exit_layer, c.num_draft_tokens) for c in cells] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert cells[3].alpha == pytest.approx(0.5) and cells[3].tokens_per_round == pytest.approx(1.7)
    assert cells[3].cost_ratio == pytest.approx(0.3)
    assert cells[3].verify_ratio == pytest.approx(1.0)
    assert cells[3].speedup_model == pytest.approx(1.75 / 1.6)
    assert cells[3].speedup_predicted == pytest.approx(1.7 / (0.6 + 1.0 + 0.02))


def test_the_better_prediction_comes_first_and_of_equals_the_smaller() -> None:
    cells = [cell(3, 1, 1.1), cell(2, 4, 1.3), cell(2, 2, 1.3), cell(4, 1, 0.9)]
    assert select.ranked(cells) == [cells[2], cells[1], cells[0], cells[3]]


def test_the_best_of_each_drafter_comes_before_the_second_of_any() -> None:
    found = [
        candidate(EIGHT, 1.5, 1.0),
        candidate(SKIP, 0.8, 1.0),
        candidate(FOUR, 1.6, 1.0),
        candidate(COPY, 1.2, 1.0),
    ]
    assert [c.settings for c in decision.ranked_candidates(found)] == [FOUR, COPY, SKIP, EIGHT]


def test_speculation_is_enabled_by_prediction_and_confirmation_together() -> None:
    good, poor = candidate(COPY, 1.3, 1.0), candidate(COPY, 0.95, 1.0)
    assert decide([good], [result(COPY, 1.2)]).enabled
    refused = decide([good], [result(COPY, 0.97)])
    assert not refused.enabled and "×1.30" in refused.reason and "×0.97" in refused.reason
    low = decide([poor], [result(COPY, 1.1)])
    assert not low.enabled and "×0.95" in low.reason and "×1.10" in low.reason and "emits 0.95 tokens" in low.reason
    assert "α too low" in decide([candidate(SKIP, 0.9, 1.0)], []).reason
    assert decide([good], [], must_confirm=False).enabled
    assert not decide([good], [], must_confirm=True).enabled
    assert not decide([poor], [], must_confirm=False).enabled


def test_of_the_confirmed_the_one_measured_fastest_is_chosen_and_what_the_runner_up_lacks_is_said() -> None:
    found = [candidate(COPY, 2.0, 1.5), candidate(FOUR, 3.0, 2.4), candidate(SKIP, 1.5, 1.9)]
    choice = decide(found, [result(COPY, 1.1), result(FOUR, 1.2)])
    assert (choice.candidate, choice.confirmed, choice.enabled) == (found[1], result(FOUR, 1.2), True)
    second = "Runner-up: copy, measured ×1.10: its steps emit fewer tokens (2.00 against 3.00)"
    assert choice.reason.endswith(second)
    dearer = decide([found[0], found[2]], [result(COPY, 1.3)]).reason
    assert "Runner-up: layer-skip E=2, not tried, predicted ×0.79" in dearer
    assert "emit fewer tokens (1.50 against 2.00) and its steps cost more (1.90 against 1.50 plain steps)" in dearer


def test_a_choice_that_no_context_length_would_use_is_off() -> None:
    choice = decide([replace(candidate(SKIP, 1.3, 1.0), num_draft_tokens=1)], [result(SKIP, 1.2)])
    off = decision.off_everywhere(choice, [{"num_draft_tokens": 0}, {"num_draft_tokens": 0}])
    assert choice.enabled and not off.enabled and "lost to any change of traffic" in off.reason
    copied = decide([candidate(COPY, 1.3, 1.0)], [result(COPY, 1.2)])
    reason = decision.off_everywhere(copied, [{"num_draft_tokens": 0}]).reason
    assert reason.startswith("copy pays at none of the context lengths measured: ")
    assert decision.off_everywhere(choice, [{"num_draft_tokens": 0}, {"num_draft_tokens": 3}]) is choice


def test_other_tokens_in_exact_numerics_are_never_enabled() -> None:
    found = [candidate(COPY, 1.3, 1.0)]
    assert not decide(found, [result(COPY, 1.2, identical=False)]).enabled
    assert decide(found, [result(COPY, 1.2, identical=False)], exact=False).enabled
    assert decide(found, [result(COPY, 1.2, identical=None)]).enabled


@pytest.mark.parametrize(
    ("available", "asked", "profiled", "confirming"), [(20, 15, 14, 6), (20, 9, 9, 6), (7, 32, 4, 3), (1, 32, 1, 1)]
)
def test_prompts_to_confirm_with_are_those_not_profiled(
    available: int, asked: int, profiled: int, confirming: int, make_requests: MakeRequests
) -> None:
    requests = make_requests(available, 96)
    first, others = confirm.split([Prompt(request) for request in requests], asked)
    assert [prompt.request for prompt in first] == requests[:profiled] and len(others) == confirming
    assert {r.max_new_tokens for r in others} == {64}
    if available > 1:
        assert [r.id for r in others] == [r.id for r in requests[profiled : profiled + confirming]]


def test_what_may_be_noise_is_not_enabled() -> None:
    found = [candidate(COPY, 1.3, 1.0), candidate(FOUR, 1.2, 1.0)]
    wide = replace(result(COPY, 1.1), low=0.97)
    noise = decide(found, [wide])
    assert not noise.enabled and "may be noise" in noise.reason
    assert decide(found, [wide, result(FOUR, 1.05)]).candidate is found[1], "a smaller gain that is sure"
    assert not decide(found, [replace(result(COPY, 1.1), drafted_share=0.0)]).enabled


def no_book(engine: Engine, config: SweepConfig) -> Trials:
    """Trials that confirm only, for which nothing is measured."""
    book: Any = None
    return Trials(engine, "m", config, book, 0.0, Processes())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
def test_confirming_decodes_in_turn(
    params: SamplingParams, decoder: LayeredDecoder, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = Engine(decoder, numerics="fast"), []
    generate = engine.generate

    def spy(requests: list[Request], params: Any, drafter: Any = None, policy: Any = None) -> Any:
        calls.append((requests[0].id, drafter.name if drafter else "", policy.k if policy else 0))
        return generate(requests, params, drafter, policy)

    monkeypatch.setattr(engine, "generate", spy)
    first, second = make_requests(2, 10)
    trials = no_book(engine, SweepConfig(max_draft_tokens=3))
    [found] = confirm.confirm(trials, [first, second], params, [candidate(COPY, 1.3, 1.0)])
    one = [(first.id, "", 0), (first.id, "copy", 3), (second.id, "copy", 3), (second.id, "", 0)]
    assert calls == one * 2, "A B B A"
    assert (found.label, found.num_prompts, found.num_tokens) == ("copy", 2, 20)
    assert found.identical is (True if params.greedy else None)
    assert found.speedup > 0 and 0 <= found.drafted_share <= 1


def test_changed_tokens_are_seen(make_requests: MakeRequests) -> None:
    def generate(requests: Any, params: Any, drafter: Any = None, policy: Any = None) -> Any:
        stats = Stats(total_seconds=2.0 if drafter else 3.0, prefill_seconds=1.0, emitted=5, from_prefill=1)
        for _ in range(2 if drafter else 0):
            stats.count_round("copy", 2, 1)
        return [SimpleNamespace(token_ids=[1, 2, 3, 4, 6 if drafter else 5])], stats

    engine: Any = SimpleNamespace(decoder=SimpleNamespace(num_layers=5, device=torch.device("cpu")), generate=generate)
    trials = no_book(engine, SweepConfig())
    [found] = confirm.confirm(trials, make_requests(2, 10), SamplingParams(), [candidate(COPY, 1.3, 1.0)])
    # Prefill does not count: one second against two.
    assert (found.identical, found.speedup, found.tokens_per_round, found.drafted_share) == (False, 2.0, 2.0, 1.0)


@pytest.fixture
def quick(prompts: Path) -> SweepConfig:
    return SweepConfig(
        prompts=prompts,
        raw=True,
        num_prompts=5,
        max_new_tokens=12,
        max_draft_tokens=3,
        context_lengths=(40, 100),
        repeats=2,
    )


def sweep(checkpoint: Path, make_requests: MakeRequests, config: SweepConfig, name: str | None = None) -> select.Sweep:
    engine = Engine(load_decoder(str(checkpoint)), numerics="fast")
    prompts = [Prompt(request) for request in make_requests(7, config.max_new_tokens)]
    found = select.sweep(name or str(checkpoint), engine, prompts, config)
    assert found is not None
    return found


def test_a_sweep_writes_an_artifact_that_can_be_read(
    own_checkpoint: Path, make_requests: MakeRequests, quick: SweepConfig
) -> None:
    found = sweep(own_checkpoint, make_requests, quick)
    assert found.path == own_checkpoint / artifacts.FILE_NAME
    written = artifacts.read(own_checkpoint)
    assert written == found.artifact
    best = max(c.speedup_predicted for c in found.cells if c.exit_layer in (2, 3))
    by_drafter = {c.settings.drafter: c for c in found.candidates}
    assert by_drafter["layer-skip"].speedup_predicted == pytest.approx(best)
    assert set(by_drafter) == {"layer-skip", "copy", "low-precision", "hybrid"} and len(found.candidates) == 7
    chosen = next(c for c in found.candidates if c.label == found.confirmed[0].label)
    if len(found.confirmed) == 1:
        assert written.speedup_predicted == chosen.speedup_predicted
    assert (written.numerics, written.rows, written.num_layers, written.k_max) == ("fast", [], 4, 3)
    assert written.eval_set == {"name": "prompts.jsonl", "num_prompts": 4, "num_tokens": 48} | {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0,
    }  # fmt: skip
    assert set(written.measured_on) == {"device", "dtype", "threads", "torch", "transformers", "triton", "numba"}
    assert written.speedup_confirmed in [asdict(result) for result in found.confirmed]
    assert written.reason
    assert len(found.cells) == 9


def test_a_verdict_of_regress_is_kept_only_for_the_same_weights(
    own_checkpoint: Path, make_requests: MakeRequests, quick: SweepConfig
) -> None:
    quick = replace(quick, confirm=0)
    first = sweep(own_checkpoint, make_requests, quick).artifact
    settings = DraftSettings.of(first)
    tested = {"passed": False, "drafters": [settings.label], "numerics": "fast"}
    verdict = {"passed": False, "perplexity": {"passed": True}, "lossless": tested}
    artifacts.write(own_checkpoint, artifacts.with_regress(first, verdict))
    assert record._kept_verdict(own_checkpoint, settings, "fast") == verdict
    # What was found about another drafter's losslessness is not about this one.
    kept = {"status": "passed", "passed": True, "perplexity": {"passed": True}, "lossless": None}
    other = DraftSettings("low-precision", draft_bits=8, exit_layer=1)
    assert record._kept_verdict(own_checkpoint, other, "fast") == kept
    assert record._kept_verdict(own_checkpoint, settings, "exact") == kept, "other numerics"
    assert sweep(own_checkpoint, make_requests, quick).artifact.regress in (verdict, kept)
    foreign = replace(artifacts.with_regress(first, verdict), checkpoint_fingerprint="0" * 64)
    artifacts.write(own_checkpoint, foreign)
    assert sweep(own_checkpoint, make_requests, quick).artifact.regress is None
    assert artifacts.read(own_checkpoint) is not None


def test_beside_a_hub_name_nothing_is_written(
    own_checkpoint: Path, make_requests: MakeRequests, quick: SweepConfig
) -> None:
    found = sweep(own_checkpoint, make_requests, replace(quick, confirm=0), name="someone/some-model")
    assert found.path is None
    assert not (own_checkpoint / artifacts.FILE_NAME).exists()
    assert found.artifact.checkpoint_fingerprint == ""


def test_a_better_exit_outside_the_window_is_named(
    own_checkpoint: Path, make_requests: MakeRequests, quick: SweepConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*_: Any) -> list[Cell]:
        return [cell(1, 2, 1.4), cell(2, 1, 1.2), cell(3, 1, 1.1)]

    monkeypatch.setattr(select, "score", score)
    quick = replace(quick, drafters=("layer-skip",))
    context = {
        "max_context": 99,
        "context_length": 99,
        "exit_layer": 2,
        "num_draft_tokens": 2,
        "speedup_predicted": 1.2,
    }
    monkeypatch.setattr(select, "layer_skip_by_context", lambda *_: [context])
    monkeypatch.setattr(select, "confirm", lambda *_: [result(SKIP, 1.15)])
    found = sweep(own_checkpoint, make_requests, quick)
    assert found.better_outside_window == cell(1, 2, 1.4)
    assert (found.artifact.enabled, found.artifact.exit_layer, found.artifact.num_draft_tokens) == (True, 2, 1)
    monkeypatch.setattr(select, "confirm", lambda *_: [])
    assert sweep(own_checkpoint, make_requests, replace(quick, window=(0.0, 0.5))).better_outside_window is None


@pytest.mark.parametrize(("best", "tried"), [(0.6, 1), (0.95, 2)])
def test_where_nothing_can_pay_one_drafter_is_confirmed(
    best: float,
    tried: int,
    own_checkpoint: Path,
    make_requests: MakeRequests,
    quick: SweepConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def record(_trials: Any, _requests: Any, _params: Any, found: list[Candidate]) -> list[Confirmed]:
        asked.extend(found)
        return []

    found = [candidate(COPY, best, 1.0), candidate(SKIP, best, 1.1), candidate(FOUR, best, 1.2)]
    monkeypatch.setattr(Trials, "candidates", lambda *_: found)
    monkeypatch.setattr(Trials, "sum", lambda *_: Stats())
    monkeypatch.setattr(select, "confirm", record)
    sweep(own_checkpoint, make_requests, replace(quick, confirm=2))
    assert asked == found[:tried]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": (0.1, 0.15)}, "no exit layer lies in the window"),
        ({"context_lengths": (1021, 4000)}, "no context length to measure costs at fits"),
    ],
)
def test_what_cannot_work_fails_at_once(
    changes: dict[str, Any], message: str, decoder: LayeredDecoder, make_requests: MakeRequests, quick: SweepConfig
) -> None:
    with pytest.raises(UserError, match=message):
        select.check_fits(decoder, [Prompt(r) for r in make_requests(2, 12)], replace(quick, **changes))
    with pytest.raises(UserError, match="longer than the model's context"):
        select.check_fits(decoder, [Prompt(r) for r in make_requests(2, 1022)], quick)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None}, "needs prompts"),
        ({"num_prompts": 0}, "--num-prompts is too small"),
        ({"max_draft_tokens": 0}, "--max-draft-tokens is too small"),
        ({"context_lengths": (128, 15)}, "--context-lengths is too small"),
        ({"batch_sizes": ()}, "--batch-sizes is too small"),
        ({"draft_vocab": (0,)}, "--draft-vocab is too small"),
        ({"confirm": -1}, "--confirm is too small"),
        ({"max_new_tokens": 4}, "too short to hold a whole round"),
        ({"window": (0.8, 0.3)}, "--window"),
        ({"window": (0.3, 30.0)}, "--window"),
    ],
)
def test_options_that_cannot_work(changes: dict[str, Any], message: str, quick: SweepConfig) -> None:
    check_options(quick)
    with pytest.raises(UserError, match=message):
        check_options(replace(quick, **changes))


ARGUMENTS = ["--num-prompts", "5", "--max-new-tokens", "12", "--max-draft-tokens", "2", "--context-lengths", "40,100"]


def test_the_command_prints_one_json_object(own_checkpoint: Path, prompts: Path) -> None:
    command = ["sweep-exit", str(own_checkpoint), "--prompts", str(prompts), *ARGUMENTS, "--repeats", "2", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["artifact"] == asdict(artifacts.read(own_checkpoint))  # type: ignore[arg-type]
    assert {(c["exit_layer"], c["num_draft_tokens"]) for c in printed["cells"]} == {
        (e, k) for e in (1, 2, 3) for k in (1, 2)
    }
    assert set(printed["alpha_by_exit"]) == {"1", "2", "3"}
    assert printed["confirmed"][0]["identical"] is True
    assert printed["path"] == str(own_checkpoint / artifacts.FILE_NAME)
    assert printed["plain_tokens_per_second"] > 0 and printed["costs"][0]["exact_over_fast"] > 0
    assert "better_outside_window" in printed


def test_the_command_draws_the_cells_and_says_what_it_chose(
    own_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    command = ["sweep-exit", str(own_checkpoint), "--prompts", str(prompts), *ARGUMENTS, "--repeats", "2"]
    command += ["--report", str(report)]
    done = CliRunner().invoke(app, [*command, "--confirm", "0", "--numerics", "fast"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "only 2 prompts were profiled" in done.stdout
    for piece in ("E=1", "E=3", "k=2", "speculation o", "needed", "written: ", "hybrid", "8-bit"):
        assert piece in done.stdout
    assert f"report: {report / 'index.html'}" in done.stderr
    assert (report / "index.html").is_file() and (report / "sweep.json").is_file()
