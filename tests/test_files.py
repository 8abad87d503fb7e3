"""Files are whole or not there, and a bad line is named."""

from __future__ import annotations

import pytest

from selfspec_tune.errors import UserError
from selfspec_tune.files import atomic_writer, read_json, read_jsonl, read_text, write_bytes, write_json


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(KeyboardInterrupt), atomic_writer(path) as handle:
        handle.write("half of it")
        raise KeyboardInterrupt
    assert read_json(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_new_file_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").touch()
    write_json(tmp_path / "deep" / "a.json", [])
    assert (tmp_path / "deep" / "a.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"a": 1}\n\n[1]\n', ":3 is not a JSON object"),
        (b"{\n", ":1 is not valid JSON"),
        (b'"\xe9"', ":1 is not valid"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_jsonl(path)


@pytest.mark.parametrize("read", [read_json, read_jsonl, read_text])
def test_missing_files(tmp_path, read):
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "none")


def test_bytes_are_whole_or_not_there(tmp_path):
    path = tmp_path / "deep" / "a.png"
    write_bytes(path, b"\x89PNG\r\n")
    assert path.read_bytes() == b"\x89PNG\r\n"
    with pytest.raises(TypeError):
        write_bytes(path, "text")
    assert path.read_bytes() == b"\x89PNG\r\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]
