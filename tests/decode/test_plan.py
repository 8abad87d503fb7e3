"""What `selfspec.json` and flags add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS, DecodeConfig
from selfspec_tune.decode import plan as plans
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.plan import DEFAULT_NUM_DRAFT_TOKENS, choose, make_plan
from selfspec_tune.decode.policy import CostPolicy, DraftCosts, DraftPolicy
from selfspec_tune.decode.price import measured_on
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import load_tokenizer

GOOD = Artifact(
    "f", "llama", 6, True, "", exit_layer=3, num_draft_tokens=4, cost_ratio=0.3, verify_ratio=1.2, numerics="exact"
)
SKIP = DraftSettings("layer-skip", 3)
OFF = replace(GOOD, enabled=False, reason="alpha is 0.1")


def test_the_artifact_decides():
    choice = choose(GOOD, DecodeConfig(), "m")
    assert (choice.settings, choice.numerics, choice.notices) == (SKIP, "exact", [])
    assert (choice.k_policy, choice.num_draft_tokens, choice.as_measured) == ("cost", 8, True)
    assert choose(GOOD, DecodeConfig(k_policy="fixed"), "m").num_draft_tokens == 4


def test_the_artifacts_policy_is_used_and_a_given_k_is_a_fixed_one():
    assert choose(replace(GOOD, k_policy="window"), DecodeConfig(), "m").k_policy == "window"
    given = choose(GOOD, DecodeConfig(num_draft_tokens=2), "m")
    assert (given.k_policy, given.num_draft_tokens) == ("fixed", 2)
    said = ["num_draft_tokens 2 overrides selfspec.json's 4", "k_policy fixed overrides selfspec.json's cost"]
    assert given.notices == said


def test_flags_override_with_a_notice():
    choice = choose(GOOD, DecodeConfig(exit_layer=2, numerics="fast"), "m")
    assert (choice.settings, choice.numerics) == (replace(SKIP, exit_layer=2), "fast")
    assert not choice.as_measured
    assert len(choice.notices) == 2 and all("overrides" in notice for notice in choice.notices)


def test_every_drafter_of_an_artifact_is_read_back():
    for settings in (
        DraftSettings("copy"),
        DraftSettings("low-precision", draft_bits=8, draft_head_bits=4),
        DraftSettings("hybrid", exit_layer=2, hybrid_with="layer-skip"),
    ):
        artifact = replace(GOOD, **settings.to_artifact())
        choice = choose(artifact, DecodeConfig(), "m")
        assert choice.settings == settings and choice.as_measured and choice.notices == []
    bits = choose(replace(GOOD, **DraftSettings("low-precision").to_artifact()), DecodeConfig(draft_bits="8"), "m")
    assert bits.settings == DraftSettings("low-precision", draft_bits=8)
    assert bits.notices == ["draft_bits 8 overrides selfspec.json's 4"] and not bits.as_measured
    fewer = choose(replace(GOOD, **DraftSettings("low-precision").to_artifact()), DecodeConfig(draft_vocab=9), "m")
    assert fewer.notices == ["draft_vocab 9 overrides selfspec.json's default"] and not fewer.as_measured


def test_an_exit_layer_beside_a_drafter_without_one_asks_for_layer_skip():
    choice = choose(replace(GOOD, **DraftSettings("copy").to_artifact()), DecodeConfig(exit_layer=2), "m")
    assert choice.settings == DraftSettings("layer-skip", 2)


def test_without_artifact_and_flags_it_decodes_plainly_and_says_how_to_get_one():
    choice = choose(None, DecodeConfig(), "m")
    assert choice.settings is None and choice.numerics == "exact"
    assert "selfspec sweep-exit m" in choice.notices[0]


def test_a_disabled_artifact_decodes_plainly_and_says_why():
    choice = choose(OFF, DecodeConfig(), "m")
    assert choice.settings is None and "alpha is 0.1" in choice.notices[0]
    forced = choose(OFF, DecodeConfig(exit_layer=2, k_policy="fixed"), "m")
    assert forced.settings == DraftSettings("layer-skip", 2) and forced.num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert "alpha is 0.1" in forced.notices[0]


def test_no_speculation():
    assert choose(GOOD, DecodeConfig(no_speculation=True), "m").settings is None
    with pytest.raises(UserError, match="both"):
        choose(GOOD, DecodeConfig(no_speculation=True, exit_layer=2), "m")


def test_a_drafter_by_name_overrides_the_artifact_with_a_notice():
    choice = choose(GOOD, DecodeConfig(drafter="low-precision"), "m")
    assert choice.settings == DraftSettings("low-precision") and not choice.as_measured
    assert choice.notices == ["drafter low-precision overrides selfspec.json's layer-skip"]
    assert "alpha is 0.1" in choose(OFF, DecodeConfig(drafter="copy"), "m").notices[0]
    assert choose(None, DecodeConfig(drafter="copy"), "m").notices == []


def test_the_cost_policy_may_use_every_k():
    assert choose(None, DecodeConfig(drafter="copy"), "m").num_draft_tokens == MAX_DRAFT_TOKENS
    assert choose(replace(GOOD, k_max=5), DecodeConfig(), "m").num_draft_tokens == 5
    assert choose(None, DecodeConfig(drafter="copy", k_policy="cost", num_draft_tokens=2), "m").num_draft_tokens == 2


def test_hybrid_with_layer_skip_takes_the_artifacts_exit():
    options = DecodeConfig(drafter="hybrid", hybrid_with="layer-skip")
    assert choose(GOOD, options, "m").settings == DraftSettings("hybrid", 3, hybrid_with="layer-skip")
    with pytest.raises(UserError, match="needs an exit layer"):
        choose(None, options, "m")


@pytest.mark.parametrize(
    "name, kind",
    [("copy", PromptLookupDrafter), ("low-precision", LowPrecisionDrafter), ("hybrid", HybridDrafter)],
)
def test_every_drafter_decodes_what_plain_decoding_does_under_every_policy(checkpoint, name, kind):
    tokenizer, request = load_tokenizer(str(checkpoint)), Request("a", [5, 6, 7, 5, 6, 7, 5, 6], 40)
    [plain], _ = make_plan(str(checkpoint), tokenizer, None, DecodeConfig()).generate([request], SamplingParams())
    for k_policy in ("fixed", "window", "cost"):
        plan = make_plan(str(checkpoint), tokenizer, None, DecodeConfig(drafter=name, k_policy=k_policy))
        assert isinstance(plan.drafter, kind)
        [completion], _ = plan.generate([request], SamplingParams())
        assert completion.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "options",
    [
        DecodeConfig(drafter="copy", exit_layer=3),
        DecodeConfig(drafter="exit-head", exit_layer=3),
        DecodeConfig(drafter="layer-skip"),
        DecodeConfig(drafter="copy", no_speculation=True),
        DecodeConfig(draft_bits="4", no_speculation=True),
        DecodeConfig(draft_bits="4"),
        DecodeConfig(drafter="copy", draft_bits="4"),
        DecodeConfig(drafter="copy", draft_vocab=10),
        DecodeConfig(exit_layer=2, hybrid_with="low-precision"),
        DecodeConfig(drafter="hybrid", hybrid_with="layer-skip", exit_layer=2, draft_group="64"),
    ],
)
def test_drafters_and_options_that_do_not_go_together(options):
    with pytest.raises(UserError):
        choose(None, options, "m")


def test_an_exit_head_that_is_not_there_is_a_user_error(checkpoint):
    with pytest.raises(UserError, match="no exit head"):
        make_plan(str(checkpoint), None, None, DecodeConfig(drafter="exit-head"))


@pytest.mark.parametrize("options", [DecodeConfig(num_draft_tokens=3), DecodeConfig(exit_layer=2, num_draft_tokens=0)])
def test_drafts_that_cannot_be(options):
    with pytest.raises(UserError):
        choose(None, options, "m")


def test_costs_in_the_artifact_save_timing_them_but_only_where_they_were_measured(checkpoint, monkeypatch):
    costs = {"copy": {"alpha": 0.7, "cost_ratio": 0.01, "verify_ratio": [1.1] * 8, "overhead": 0.02}}
    here = measured_on(load_decoder(str(checkpoint)))
    artifact = replace(GOOD, **DraftSettings("copy").to_artifact(), costs=costs, measured_on=here)
    timed: list[str] = []
    monkeypatch.setattr(
        plans,
        "draft_costs",
        lambda engine, part, params, progress: timed.append(part.name) or DraftCosts(0.1, (1.0,) * 8),
    )
    plan = make_plan(str(checkpoint), None, artifact, DecodeConfig())
    assert isinstance(plan.policy, CostPolicy) and timed == [] and plan.notices == []
    elsewhere = replace(artifact, measured_on={**here, "threads": 64})
    plan = make_plan(str(checkpoint), None, elsewhere, DecodeConfig())
    assert timed == ["copy"] and "threads 64 (here" in plan.notices[0]
    make_plan(str(checkpoint), None, artifact, DecodeConfig(numerics="fast"))
    assert timed == ["copy", "copy"]
    # A fixed k stops where it does not pay, by the same costs.
    fixed = make_plan(str(checkpoint), None, artifact, DecodeConfig(num_draft_tokens=3)).policy
    assert isinstance(fixed, DraftPolicy) and fixed.round_cost == pytest.approx(0.03 + 1.1 + 0.02)
    fixed = make_plan(str(checkpoint), None, elsewhere, DecodeConfig(num_draft_tokens=3)).policy
    assert isinstance(fixed, DraftPolicy) and fixed.round_cost is None


def test_the_exit_of_the_texts_length_is_used(checkpoint, monkeypatch):
    def costs(verify):
        return {"layer-skip": {"alpha": 0.9, "cost_ratio": 0.01, "verify_ratio": [verify] * 8, "overhead": 0.0}}

    here = measured_on(load_decoder(str(checkpoint)))
    entries = [
        {"max_context": 24, "exit_layer": 4, "num_draft_tokens": 4, "costs": costs(1.0)},
        {"max_context": 40, "exit_layer": 5, "num_draft_tokens": 0, "costs": costs(1.0)},
    ]
    artifact = replace(GOOD, costs=costs(1.0), by_context=entries, measured_on=here)
    monkeypatch.setattr(plans, "draft_costs", lambda *_, **__: DraftCosts(0.01, (1.0,) * 8))
    plan = make_plan(str(checkpoint), None, artifact, DecodeConfig())
    long, short = Request("a", list(range(1, 31)), 12), Request("b", [1, 2, 3], 12)
    _, stats = plan.generate([long], SamplingParams())
    assert (stats.rounds, plan.drafter.exit_layer) == (0, 5)
    _, stats = plan.generate([short], SamplingParams())
    assert stats.rounds > 0 and plan.drafter.exit_layer == 4
    # Costs measured elsewhere, or for another exit, say nothing of lengths here.
    for changed, options in (
        (replace(artifact, measured_on={**here, "threads": 64}), DecodeConfig()),
        (artifact, DecodeConfig(exit_layer=2)),
    ):
        plan = make_plan(str(checkpoint), None, changed, options)
        _, stats = plan.generate([long], SamplingParams())
        assert stats.rounds > 0 and plan.drafter.exit_layer == (options.exit_layer or 3)


def test_what_torch_compiles_is_refused_in_exact_numerics(checkpoint):
    options = DecodeConfig(compile=True, no_speculation=True, numerics="exact")
    with pytest.raises(UserError, match="not certified"):
        make_plan(str(checkpoint), None, None, options)
    plan = make_plan(str(checkpoint), None, None, replace(options, numerics="fast"))
    assert any("--compile has no effect" in notice for notice in plan.choice.notices)
