"""The verdict: what is tested, what is skipped and said to be, and that it lands in selfspec.json and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune import artifact
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import RegressConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.families import describe
from selfspec_tune.model.load import load_config, load_model
from selfspec_tune.regress import report, table
from selfspec_tune.regress.documents import Document, TextSet
from selfspec_tune.regress.inputs import Inputs
from selfspec_tune.regress.score import Scores

SPREAD = [f"layer-skip E={exit_layer}" for exit_layer in (1, 2, 3, 5)]


@pytest.fixture
def make_config(learnt: Path, heldout: Path, prompts: Path) -> Callable[..., RegressConfig]:
    """A config with both tests, small; keyword arguments override it."""

    def make(**options: Any) -> RegressConfig:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "base": str(learnt),
            "text": (heldout,),
            "window_length": 64,
            "prompts": prompts,
            "num_prompts": 1,
            "max_new_tokens": 6,
            "exit_layers": (2,),
            "num_draft_tokens": (2,),
            "raw": True,
            "sampling_texts": 0,
        }
        return RegressConfig(**{**defaults, **options})

    return make


def made_artifact(checkpoint: Path, **changes: Any) -> Artifact:
    known = Artifact(
        artifact.fingerprint(checkpoint), "llama", 6, True, "pays", exit_layer=3, num_draft_tokens=4, alpha=0.7
    )
    return replace(known, **changes)


def test_identical_weights_pass_with_a_ratio_of_exactly_one(copy: Path, make_config: Callable) -> None:
    verdict, notices = report.run(str(copy), make_config())
    assert notices == []
    assert list(verdict)[:5] == ["status", "passed", "perplexity_ratio", "perplexity", "tasks"]
    assert (verdict["status"], verdict["passed"]) == ("passed", True)
    perplexity, lossless = verdict["perplexity"], verdict["lossless"]
    [whole] = perplexity["sets"]
    assert (perplexity["ratio"], perplexity["limit"]) == (1.0, 1.02) and whole["interval"] == [1.0, 1.0]
    assert (whole["kl"], whole["kl_interval"], whole["top1_agreement"]) == (0.0, [0.0, 0.0], 1.0)
    assert (whole["name"], whole["documents"], whole["available"]) == ("heldout.jsonl", 12, 12)
    assert perplexity["base"] == perplexity["trained"] < 20  # the language has been learnt: damage can show
    assert (lossless["numerics"], lossless["cases"], lossless["tokens"]) == ("exact", 1, 6)
    assert (lossless["drafters"], lossless["num_draft_tokens"]) == (["layer-skip E=2"], [2])
    assert lossless["bitwise_logits"] is True and lossless["first_difference"] is None

    stored = artifact.read(copy)
    assert stored is not None
    assert stored.regress == json.loads(json.dumps(verdict))
    assert (stored.enabled, stored.reason, stored.num_layers) == (False, "no sweep was run", 6)


def test_damaged_layers_fail_and_the_verdict_is_kept(damaged: Path, make_config: Callable) -> None:
    verdict, _ = report.run(str(damaged), make_config())
    perplexity = verdict["perplexity"]
    assert (verdict["status"], verdict["passed"]) == ("failed", False)
    [whole] = perplexity["sets"]
    assert perplexity["ratio"] > 1.02 and whole["interval"][0] > 1.02
    assert whole["kl"] > 0.1 and whole["kl_interval"][0] > 0 and whole["top1_agreement"] < 1
    assert perplexity["ratio"] == pytest.approx(perplexity["trained"] / perplexity["base"])
    # The damaged model still decodes without loss: it is the weights that fail.
    assert verdict["lossless"]["differing_tokens"] == 0 and verdict["lossless"]["bitwise_logits"]
    stored = artifact.read(damaged)
    assert stored is not None and stored.regress is not None and stored.regress["passed"] is False
    allowed = f"{100 * whole['interval'][1]:.0f}%"
    assert report.run(str(damaged), make_config(max_perplexity_increase=allowed, prompts=None))[0]["passed"] is True


def test_a_sweep_is_kept_and_gives_the_defaults(copy: Path, make_config: Callable) -> None:
    known = made_artifact(copy)
    artifact.write(copy, known)
    verdict, _ = report.run(str(copy), make_config(base=None, text=(), exit_layers=(), num_draft_tokens=()))
    tested = verdict["lossless"]
    assert (tested["drafters"], tested["num_draft_tokens"]) == (["layer-skip E=3"], [1, 4, 8])
    assert artifact.read(copy) == artifact.with_regress(known, json.loads(json.dumps(verdict)))


def test_without_a_sweep_cells_are_spread(copy: Path, make_config: Callable) -> None:
    config = make_config(base=None, text=(), exit_layers=(), num_draft_tokens=(), max_new_tokens=2)
    found = report.run(str(copy), config)[0]["lossless"]
    assert (found["drafters"], found["num_draft_tokens"], found["cases"]) == (SPREAD, [1, 3, 7], 12)


def test_the_drafter_that_decode_would_use_is_the_one_tested(copy: Path, make_config: Callable) -> None:
    changes = {"drafter": "hybrid", "exit_layer": None, "draft": {"draft_bits": 8}}
    artifact.write(copy, made_artifact(copy, **changes))
    config = make_config(base=None, text=(), exit_layers=(), num_draft_tokens=())
    found = report.run(str(copy), config)[0]["lossless"]
    assert found["drafters"] == ["hybrid (copy, low-precision 8-bit)"] and found["bitwise_logits"]
    assert found["drafted"] > 0


def test_an_artifact_of_other_weights_is_replaced_and_not_used(copy: Path, make_config: Callable) -> None:
    artifact.write(copy, made_artifact(copy, checkpoint_fingerprint="0" * 64))
    config = make_config(base=None, text=(), exit_layers=(), num_draft_tokens=(1,), max_new_tokens=1)
    verdict, notices = report.run(str(copy), config)
    assert any("written for other weights" in text for text in notices)
    assert verdict["lossless"]["drafters"] == SPREAD
    stored = artifact.read(copy)
    assert stored is not None and stored.enabled is False and stored.exit_layer is None


def test_the_base_is_what_training_recorded(copy: Path, learnt: Path, make_config: Callable) -> None:
    (copy / "training.json").write_text(json.dumps({"base": str(learnt)}), encoding="utf-8")
    verdict, notices = report.run(str(copy), make_config(base=None, prompts=None))
    assert verdict["perplexity"]["ratio"] == 1.0 and verdict["lossless"] is None
    assert [text for text in notices if "losslessness was not tested" in text]
    (copy / "training.json").write_text(json.dumps({"base": str(copy / "gone")}), encoding="utf-8")
    with pytest.raises(UserError, match="is gone"):
        report.run(str(copy), make_config(base=None, prompts=None))


def test_what_is_not_tested_is_said(copy: Path, make_config: Callable) -> None:
    verdict, notices = report.run(str(copy), make_config(base=None, text=()))
    assert verdict["perplexity"] is None and verdict["passed"] is True
    assert any("weights were not compared" in text and "--text" in text for text in notices)


@pytest.mark.parametrize("asked", [{}, {"text": (), "tasks": ("x.jsonl",)}], ids=["text", "tasks"])
def test_a_test_asked_for_that_has_no_base_does_not_pass_untested(
    copy: Path, make_config: Callable, asked: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="no base is known"):
        report.run(str(copy), make_config(base=None, **asked))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": None, "text": (), "prompts": None}, "nothing to test"),
        ({"num_draft_tokens": (9,)}, "num-draft-tokens"),
        ({"sampling_top_p": 0.0}, "top_p"),
        ({"text": ()}, "none was given"),
        ({"num_prompts": 0}, "num-prompts"),
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"window_length": 1}, "window-length"),
        ({"window_length": 4096}, "longer than the model's context"),
        ({"max_documents": 0}, "max-documents"),
        ({"max_windows": 0}, "max-windows"),
        ({"report": Path(__file__)}, "not a directory"),
        ({"sampling_texts": -1}, "sampling-texts"),
        ({"sampling_texts": 1, "sampling_temperature": 0.0}, "sampling-temperature"),
        ({"task_limit": 0}, "task-limit"),
        ({"max_task_drop": "much"}, "max_task_drop"),
        ({"tasks": ("missing.jsonl",)}, "missing.jsonl does not exist"),
        ({"max_perplexity_increase": "much"}, "max_perplexity_increase"),
        ({"base": "does/not/exist"}, "found at"),
        ({"exit_layers": (6,), "text": (), "base": None}, "exit-layers"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    copy: Path, make_config: Callable, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        report.run(str(copy), make_config(**options))
    assert not (copy / artifact.FILE_NAME).exists()


def test_another_tokenizer_is_refused(copy: Path, make_config: Callable) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(copy)
    with pytest.raises(UserError, match="tokenizers of model and base differ"):
        report.run(str(copy), make_config())


def test_another_vocabulary_size_is_refused(copy: Path, make_config: Callable) -> None:
    model = load_model(str(copy))
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.save_pretrained(copy)
    with pytest.raises(UserError, match="padded to different sizes"):
        report.run(str(copy), make_config())


def test_both_are_scored_in_the_models_dtype(copy: Path, make_config: Callable) -> None:
    import torch

    model = load_model(str(copy)).to(torch.bfloat16)
    model.save_pretrained(copy)
    # An fp32 base scored as fp32 would differ from its bf16 copy by the rounding, which training did not do.
    assert report.run(str(copy), make_config(prompts=None))[0]["perplexity"]["ratio"] == 1.0


def test_a_hub_name_and_a_folder_that_cannot_be_written_give_a_notice(copy: Path) -> None:
    family, verdict = describe(load_config(str(copy))), report.build_verdict(None, None, None, {}, {})
    assert "not stored" in report.store("someone/some-model", verdict, family, None)[0]
    (copy / artifact.FILE_NAME).mkdir()
    assert "could not be stored" in report.store(str(copy), verdict, family, None)[0]


def test_a_run_that_tests_only_half_does_not_hide_that_the_other_half_failed() -> None:
    failed = {"ratio": 1.5, "passed": False}
    earlier = {"passed": False, "perplexity_ratio": 1.5, "perplexity": failed, "lossless": None, "date": "then"}
    now = {"passed": True, "perplexity_ratio": None, "perplexity": None, "lossless": {"passed": True}, "date": "now"}
    both = report.merged(now, earlier)
    assert not both["passed"] and both["perplexity_ratio"] == 1.5
    assert both["status"] == "failed" and both["lossless"] == {"passed": True}
    assert both["perplexity"] == {"date": "then", "status": "failed", **failed}
    better = {**now, "perplexity_ratio": 1.0, "perplexity": {"ratio": 1.0, "passed": True}}
    assert report.merged(better, earlier)["passed"], "what was tested anew replaces what failed"


def test_a_tiny_text_is_undecided_and_the_advised_number_of_documents_decides(
    copy: Path, make_config: Callable, make_texts: Callable, tmp_path: Path
) -> None:
    """The advice usually decides (see test_quality); texts and noise are fixed, so this cannot fail by chance."""
    import torch

    model = load_model(str(copy))
    torch.manual_seed(2)
    with torch.no_grad():
        for layer in model.model.layers[-2:]:
            for parameter in layer.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(copy)
    gate = {"prompts": None, "max_perplexity_increase": "1.5%"}
    found = {}
    for name, options in {"few": {"max_documents": 3}, "eight": {"max_documents": 8}}.items():
        text = make_texts(tmp_path / f"{name}.jsonl", 8, 5000)
        verdict, _ = report.run(str(copy), make_config(text=(text,), **gate, **options))
        found[name] = verdict["perplexity"]["sets"][0]
        assert (verdict["status"], verdict["passed"], found[name]["status"]) == ("undecided", False, "undecided")
    assert artifact.read(copy).regress["status"] == "undecided"  # type: ignore[union-attr, index]
    needed = found["eight"]["needed"]
    assert found["few"]["needed"] >= 8 and 8 < needed < 2000
    text = make_texts(tmp_path / "enough.jsonl", needed, 10_000)
    verdict, _ = report.run(str(copy), make_config(text=(text,), **gate, max_documents=needed))
    assert verdict["perplexity"]["sets"][0]["status"] in ("passed", "failed")


def test_every_text_set_is_gated_and_all_together(
    damaged: Path, heldout: Path, make_config: Callable, jsonl: Callable, tmp_path: Path
) -> None:
    import torch

    strange = jsonl(tmp_path / "strange.jsonl", [{"text": chr(33 + n) * 40} for n in range(12)])
    config = make_config(text=(heldout, strange), prompts=None)
    sets = report.run(str(damaged), config)[0]["perplexity"]["sets"]
    assert [each["name"] for each in sets] == ["heldout.jsonl", "strange.jsonl", "all together"]
    assert sets[0]["status"] == "failed" and sets[2]["documents"] == sets[2]["available"] == 24
    assert sets[2]["tokens"] == sets[0]["tokens"] + sets[1]["tokens"]
    alone = report.run(str(damaged), make_config(prompts=None))[0]["perplexity"]["sets"]
    assert alone[0] == sets[0], "a set says the same alone and beside others"
    # One failing set fails the gate, whatever the others say.
    texts = [TextSet(name, [Document([])] * 12, 12) for name in "ab"]
    worse = torch.tensor([1.0] * 12 + [-1.0] * 12, dtype=torch.float64)
    scores = Scores(worse, *(torch.full((24,), value, dtype=torch.float64) for value in (0, 0.1, 5, 10)))
    compared = report.compare_sets(Inputs("base", None, [], None, texts, max_increase=0.02), scores, same=False)
    assert [each.status for each in compared] == ["failed", "passed", "undecided"]
    assert report.build_verdict(compared, None, None, {}, {})["status"] == "failed"


def test_tasks_are_compared_with_the_base_and_count(
    copy: Path, checkpoint: Path, make_config: Callable, jsonl: Callable, tmp_path: Path
) -> None:
    # Choices of equal letters, one a word of the language: the model that has learnt it knows, a random one guesses.
    words = ["cat", "dog", "bird", "house", "tree", "small", "the", "red"]
    records = [
        {"question": f"the {one} sees a", "choices": [other, other[::-1]], "answer": 0}
        for one in words
        for other in words
    ]
    path = jsonl(tmp_path / "words.jsonl", records)
    config = make_config(text=(), prompts=None, tasks=(str(path),), task_limit=40)
    verdict, notices = report.run(str(copy), config)
    assert notices[0].endswith("(--text): perplexity was not tested")
    [task] = verdict["tasks"]["tasks"]
    assert (task["documents"], task["difference"], task["status"]) == (40, 0.0, "passed") and task["base"] > 0.6
    assert (verdict["status"], verdict["perplexity"]) == ("passed", None)
    untrained = shutil.copytree(checkpoint, tmp_path / "untrained")
    verdict, _ = report.run(str(untrained), config)
    assert verdict["status"] == verdict["tasks"]["status"] == "failed"
    [change] = [row for row in table.rows(verdict) if row.test == "change, 95 % interval"]
    assert change.part == "task words.jsonl: 40 documents"
    assert (change.allowed, change.status) == ("at least -0.0100", "FAILED")


def test_sampling_is_tested_on_the_prompts_by_default_and_counts(copy: Path, make_config: Callable) -> None:
    few = make_config(base=None, text=(), sampling_texts=1)
    verdict, _ = report.run(str(copy), few)
    assert (verdict["lossless"]["status"], verdict["sampling"]["status"]) == ("passed", "passed")
    assert "too few tokens: more --sampling-texts" in [row.status for row in table.rows(verdict)]
    verdict, _ = report.run(str(copy), make_config(base=None, text=(), sampling_texts=90, sampling_top_p=0.95))
    found = verdict["sampling"]
    assert (verdict["status"], found["status"], found["top_p"], found["temperature"]) == ("passed", "passed", 0.95, 1.0)
    assert RegressConfig().sampling_texts == 1
    shown = {row.test: (row.found, row.status) for row in table.rows(verdict) if row.part.startswith("sampling: 1 ")}
    assert shown["shared noise: differing"] == ("0 of 6", "passed")
    assert shown["impossible tokens"] == ("0", "passed") and shown["least p-value of 2 tests"][1] == "passed"


def test_a_sampler_that_is_not_lossless_fails_the_gate(
    copy: Path, make_config: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfspec_tune.decode import round as round_module

    real = round_module.accept_ratio
    # Accepts every draft token, whatever the target says of it.
    monkeypatch.setattr(round_module, "accept_ratio", lambda d, q, p, u, last: real(d, q, p, u * 0, last))
    verdict, _ = report.run(str(copy), make_config(base=None, text=(), sampling_texts=90))
    assert (verdict["lossless"]["status"], verdict["sampling"]["status"]) == ("passed", "failed")
    assert verdict["status"] == "failed"
