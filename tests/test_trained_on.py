"""Texts that were trained on are found, others are not, from a file of bounded size.

Words are drawn from a large vocabulary with fixed seeds: two texts share a run of 8 words by chance with probability
below 1e-30, so nothing here is a matter of luck but where a test says so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from selfspec_tune import trained_on
from selfspec_tune.errors import UserError
from selfspec_tune.trained_on import Overlap, TrainedOn, notices, overlap

CHINESE = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少"


def text(seed: int | str, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(100_000)}" for _ in range(words))


def kept(directory: Path, *documents: Iterable[str]) -> Path:
    """Write the file for some documents, each given in parts."""
    known = TrainedOn()
    for parts in documents:
        known.add(parts)
    known.write(directory)
    return directory


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep few hashes, so that a large text is sampled."""
    monkeypatch.setattr(trained_on, "CAPACITY", 2000)
    monkeypatch.setattr(trained_on, "PENDING", 500)


def test_a_text_its_beginning_and_its_middle_are_found_and_another_is_not(tmp_path: Path) -> None:
    trained = text(1, 300)
    kept(tmp_path, [trained])
    words = trained.split()
    seen = [trained, " ".join(words[:12]), " ".join(words[100:150]), trained.upper().replace(" ", "\n\t ")]
    assert overlap(tmp_path, seen) == Overlap(4, 4)
    assert overlap(tmp_path, [*seen, text(2, 300), text(3, 20), ""]) == Overlap(4, 7)


def test_a_short_prompt_is_found_as_a_whole_only(tmp_path: Path) -> None:
    kept(tmp_path, ["Why is the sky blue?", "Because of " + text(1, 30)], ["Name a river."])
    assert overlap(tmp_path, ["why is  the sky BLUE?\n"]) == Overlap(1, 1)
    assert overlap(tmp_path, ["Why is the sky", "Why is the sky blue? Name a river.", "river"]) == Overlap(0, 3)


def test_a_conversation_is_found_across_its_messages(tmp_path: Path) -> None:
    messages = [text(seed, 5) for seed in range(6)]
    kept(tmp_path, messages)
    assert overlap(tmp_path, ["\n".join(messages[:3]), messages[4], text(9, 15)]) == Overlap(2, 3)


def test_half_of_the_shingles_decide(tmp_path: Path) -> None:
    kept(tmp_path, [text(1, 100)])
    begin = " ".join(text(1, 100).split()[:57])  # 50 shingles
    assert overlap(tmp_path, [f"{begin} {text(2, 50)}"]) == Overlap(1, 1)
    assert overlap(tmp_path, [f"{begin} {text(2, 51)}"]) == Overlap(0, 1)


@pytest.mark.parametrize("count", [1, 8])
def test_a_shared_system_prompt_is_no_overlap(tmp_path: Path, count: int) -> None:
    template = text("system", 20)
    kept(tmp_path, *([f"{template} {text(seed, 30)}"] for seed in range(20)))
    assert overlap(tmp_path, [f"{template} {text(100 + seed, 30)}" for seed in range(count)]) == Overlap(0, count)


def test_long_instructions_that_many_prompts_share_count_for_none(tmp_path: Path) -> None:
    template = text("few examples", 400)
    kept(tmp_path, *([f"{template} {text(seed, 30)}"] for seed in range(20)))
    others = [f"{template} {text(100 + seed, 30)}" for seed in range(6)]
    seen = [f"{template} {text(seed, 30)}" for seed in range(2)]
    assert overlap(tmp_path, [*others, *seen]) == Overlap(2, 8)
    # Prompts given several times are no template, nor are texts that have nothing but it.
    assert overlap(tmp_path, [text(200, 30), *[text(5, 30)] * 6]) == Overlap(6, 7)
    assert overlap(tmp_path, [text(5, 30), text(5, 29), text(5, 28), text(5, 27)]) == Overlap(4, 4)


def test_characters_are_the_words_of_a_script_without_spaces(tmp_path: Path) -> None:
    kept(tmp_path, [CHINESE])
    assert overlap(tmp_path, [CHINESE[:12], CHINESE[5:15], CHINESE[::-1]]) == Overlap(2, 3)


def test_half_a_character_is_no_error(tmp_path: Path) -> None:
    kept(tmp_path, ["broken \ud83d emoji"])
    assert overlap(tmp_path, ["broken \ud83d emoji"]) == Overlap(1, 1)


def test_the_file_is_bounded_and_samples_by_hash(tmp_path: Path, small: None) -> None:
    documents = [[text(seed, 200)] for seed in range(200)]  # 38 600 shingles: one in 20 is kept
    kept(tmp_path, *documents)
    stored = np.load(tmp_path / trained_on.FILE_NAME)
    assert stored.dtype == np.uint64 and len(stored) == 2001 and (stored[1:] > stored[:-1]).all()
    known = trained_on.read(tmp_path)
    assert known is not None
    # In another order, and with everything twice, the same is kept.
    (tmp_path / "again").mkdir()
    kept(tmp_path / "again", *documents[::-1], *documents)
    assert (np.load(tmp_path / "again" / trained_on.FILE_NAME) == stored).all()
    # 9 sampled shingles of each on average; at least 4 are needed, missed with probability 0.01 (Poisson), or the
    # text as a whole, which the file always has. 0 to 5 of 200 middles missed: above, with probability 0.02.
    assert overlap(tmp_path, [document for (document,) in documents]) == Overlap(200, 200)
    middles = [" ".join(document.split()[5:-5]) for (document,) in documents]
    found = overlap(tmp_path, middles)
    assert found is not None and found.found >= 195
    assert overlap(tmp_path, [text(1000 + seed, 200) for seed in range(200)]) == Overlap(0, 200)


def test_a_sample_that_shares_a_third_is_rarely_taken_for_known(tmp_path: Path, small: None) -> None:
    kept(tmp_path, *([text(seed, 200)] for seed in range(200)))
    # A third of the shingles are known. At most 1.2 % are to be taken for known, whatever m is: P(4 of 4) = 1/81.
    # More than 9 of 200 then happens with probability below 0.001.
    mixed = [" ".join(text(seed, 200).split()[:72]) + " " + text(1000 + seed, 130) for seed in range(200)]
    found = overlap(tmp_path, mixed)
    assert found is not None and found.found <= 9


def test_short_texts_are_kept_when_shingles_are_sampled(tmp_path: Path, small: None) -> None:
    short = [text(f"short {seed}", 5) for seed in range(100)]
    kept(tmp_path, *([text(seed, 200)] for seed in range(200)), *([each] for each in short))
    assert overlap(tmp_path, [*short, text("other", 5)]) == Overlap(100, 101)


def test_without_a_file_or_a_word_nobody_can_tell(tmp_path: Path) -> None:
    assert overlap(tmp_path, ["some text"]) is None
    kept(tmp_path)
    assert overlap(tmp_path, ["", " \n"]) is None
    assert overlap(tmp_path, ["some text"]) == Overlap(0, 1)
    assert notices(None, ["some text"], what="prompts", flattered="acceptance") == []


def test_the_line_says_how_many_and_what_to_do(tmp_path: Path) -> None:
    kept(tmp_path, [text(1, 30)], [text(2, 30)])
    asked = [text(seed, 30) for seed in range(5)]
    [line] = notices(tmp_path, asked, what="prompts", flattered="acceptance")
    assert line.startswith("2 of 5 prompts occur in the data this checkpoint was trained on: acceptance is flattered")
    [line] = notices(tmp_path, asked[:2], what="texts", flattered="perplexity")
    assert line.startswith("1 of 2 texts occurs in ") and line.endswith("perplexity is flattered; use held-out texts")
    assert notices(tmp_path, asked[3:], what="prompts", flattered="acceptance") == []


@pytest.mark.parametrize("damage", ["truncated", "header", "empty", "text", "floats", "no limit", "unsorted"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = kept(tmp_path, [text(1, 50)]) / trained_on.FILE_NAME
    whole = path.read_bytes()
    if damage in ("floats", "no limit", "unsorted"):
        stored = np.load(path)
        np.save(path, {"floats": stored.astype(float), "no limit": stored[:0], "unsorted": stored[::-1]}[damage])
    else:
        path.write_bytes({"truncated": whole[:-5], "header": whole[:20], "empty": b"", "text": b"[]\n"}[damage])
    with pytest.raises(UserError, match=r"trained_on\.npy is damaged") as caught:
        overlap(tmp_path, ["some text"])
    assert caught.value.command == f"rm {path}"


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, [text(1, 50)])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept(tmp_path, [text(2, 50)])
    assert [path.name for path in tmp_path.iterdir()] == [trained_on.FILE_NAME]
    assert overlap(tmp_path, [text(1, 50), text(2, 50)]) == Overlap(1, 2)


@pytest.mark.parametrize("words", [300, 3000])
def test_what_several_processes_read_is_what_one_would_have_kept(small: None, words: int) -> None:
    # 300 words are kept whole; of 3000, each process and all of them together keep a sample.
    one, parts = TrainedOn(), [TrainedOn() for _ in range(3)]
    for number in range(6):
        document = [text(number, words), text("shared", 20)]
        one.add(document)
        parts[number % 3].add(document)
    merged = TrainedOn()
    for part in parts:
        merged.merge(part.hashes())
    assert merged.hashes().tolist() == one.hashes().tolist()
    assert (len(one.hashes()) == 2001) == (words == 3000)
