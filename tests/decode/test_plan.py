"""What `selfspec.json` and flags add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS, DecodeConfig
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Request
from selfspec_tune.decode.plan import DEFAULT_NUM_DRAFT_TOKENS, choose, make_plan
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import load_tokenizer

GOOD = Artifact(
    "f", "llama", 6, True, "", exit_layer=3, num_draft_tokens=4, cost_ratio=0.3, verify_ratio=1.2, numerics="exact"
)
OFF = replace(GOOD, enabled=False, reason="alpha is 0.1")


def test_the_artifact_decides():
    choice = choose(GOOD, DecodeConfig(), "m")
    assert (choice.exit_layer, choice.num_draft_tokens, choice.numerics, choice.notices) == (3, 4, "exact", [])
    assert choice.round_cost == pytest.approx(0.3 * 4 + 1.2)


def test_flags_override_with_a_notice():
    choice = choose(GOOD, DecodeConfig(exit_layer=2, numerics="fast"), "m")
    assert (choice.exit_layer, choice.num_draft_tokens, choice.numerics) == (2, 4, "fast")
    assert choice.round_cost is None
    assert len(choice.notices) == 2 and all("overrides" in notice for notice in choice.notices)


def test_without_artifact_and_flags_it_decodes_plainly_and_says_how_to_get_one():
    choice = choose(None, DecodeConfig(), "m")
    assert choice.drafter is None and choice.numerics == "exact"
    assert "selfspec sweep-exit m" in choice.notices[0]


def test_a_disabled_artifact_decodes_plainly_and_says_why():
    choice = choose(OFF, DecodeConfig(), "m")
    assert choice.drafter is None and "alpha is 0.1" in choice.notices[0]
    forced = choose(OFF, DecodeConfig(exit_layer=2), "m")
    assert forced.exit_layer == 2 and forced.num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert "alpha is 0.1" in forced.notices[0]


def test_no_speculation():
    assert choose(GOOD, DecodeConfig(no_speculation=True), "m").drafter is None
    with pytest.raises(UserError, match="both"):
        choose(GOOD, DecodeConfig(no_speculation=True, exit_layer=2), "m")


def test_a_drafter_by_name_overrides_the_artifact_with_a_notice():
    choice = choose(GOOD, DecodeConfig(drafter="low-precision"), "m")
    assert (choice.drafter, choice.exit_layer, choice.num_draft_tokens) == ("low-precision", None, 3)
    assert choice.notices == ["drafter low-precision overrides selfspec.json's layer-skip"]
    assert "plain decoding" in choose(OFF, DecodeConfig(drafter="copy"), "m").notices[0]
    assert choose(None, DecodeConfig(drafter="copy"), "m").notices == []


def test_the_cost_policy_may_use_every_k():
    assert choose(None, DecodeConfig(drafter="copy", k_policy="cost"), "m").num_draft_tokens == MAX_DRAFT_TOKENS
    assert choose(None, DecodeConfig(drafter="copy", k_policy="cost", num_draft_tokens=2), "m").num_draft_tokens == 2


def test_hybrid_with_layer_skip_takes_the_artifacts_exit():
    options = DecodeConfig(drafter="hybrid", hybrid_with="layer-skip")
    assert choose(GOOD, options, "m").exit_layer == 3
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
