"""What `selfspec.json` and flags add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import DecodeConfig
from selfspec_tune.decode.plan import DEFAULT_NUM_DRAFT_TOKENS, choose
from selfspec_tune.errors import UserError

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
    assert choice.exit_layer is None and choice.numerics == "exact"
    assert "selfspec sweep-exit m" in choice.notices[0]


def test_a_disabled_artifact_decodes_plainly_and_says_why():
    choice = choose(OFF, DecodeConfig(), "m")
    assert choice.exit_layer is None and "alpha is 0.1" in choice.notices[0]
    forced = choose(OFF, DecodeConfig(exit_layer=2), "m")
    assert forced.exit_layer == 2 and forced.num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert "alpha is 0.1" in forced.notices[0]


def test_no_speculation():
    assert choose(GOOD, DecodeConfig(no_speculation=True), "m").exit_layer is None
    with pytest.raises(UserError, match="both"):
        choose(GOOD, DecodeConfig(no_speculation=True, exit_layer=2), "m")


@pytest.mark.parametrize("options", [DecodeConfig(num_draft_tokens=3), DecodeConfig(exit_layer=2, num_draft_tokens=0)])
def test_drafts_that_cannot_be(options):
    with pytest.raises(UserError):
        choose(None, options, "m")
