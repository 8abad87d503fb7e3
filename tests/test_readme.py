"""README.md stays true: its commands parse, its make targets and scripts exist, its file tree names real paths.

The tree is the fenced block that has a line beginning with `selfspec_tune/`. One path a line, folders end with `/`,
two or more blanks or a `#` before the description; nested by indentation or by box-drawing characters.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from selfspec_tune.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BRANCHES = str.maketrans("│├└─", "    ")
SHELL_ENDS = {"|", ">", ">>", "<", "&&", "||", ";", "2>", "&"}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, body) of every fenced block."""
    for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```\s*$", text, flags=re.MULTILINE | re.DOTALL):
        yield match.group(1).strip(), match.group(2)


def shell_lines(text: str) -> list[str]:
    """Return the command lines of all bash blocks, continuation lines joined."""
    lines: list[str] = []
    for language, body in blocks(text):
        if language == "bash":
            joined = body.replace("\\\n", " ")
            lines += [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]
    return lines


def words_of(line: str) -> list[str]:
    """Split one command line, up to a pipe, a redirection or a comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    end = next((index for index, word in enumerate(words) if word in SHELL_ENDS), len(words))
    return words[:end]


def problems(line: str) -> list[str]:
    """Return what is wrong with a `selfspec …` line: unknown command, unknown option, missing value, stray word."""
    words, root = words_of(line)[1:], typer.main.get_command(app)
    commands: dict[str, Any] = root.commands  # type: ignore[attr-defined]
    if words and words[0].startswith("-"):
        return [f"unknown option {w}" for w in words if w not in known_options(root)]
    if not words or words[0] not in commands:
        return [f"unknown command in {line!r}"]
    command = commands[words[0]]
    options, rest, wrong = known_options(command), words[1:], []
    allowed = sum(99 if p.nargs == -1 else p.nargs for p in command.params if p.param_type_name == "argument")
    while rest:
        word = rest.pop(0)
        name, separator, _ = word.partition("=")
        if not word.startswith("-") or word == "-":
            allowed -= 1
            if allowed < 0:
                wrong.append(f"{words[0]} takes no further argument {word!r}")
        elif name not in options:
            wrong.append(f"{words[0]} has no option {name}")
        elif options[name] and not separator and (not rest or rest.pop(0).startswith("--")):
            wrong.append(f"{name} needs a value")
    return wrong


def known_options(command: Any) -> dict[str, bool]:
    """Map every option of a command to whether it takes a value."""
    known = {"--help": False, "-h": False}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for name in (*parameter.opts, *parameter.secondary_opts):
                known[name] = not (parameter.is_flag or parameter.count)
    return known


def tree_paths(text: str) -> list[str]:
    """Return the paths of the file tree, each from the repository root."""
    for _, body in blocks(text):
        lines = [line.translate(BRANCHES) for line in body.splitlines() if line.strip()]
        if any(line.lstrip().startswith("selfspec_tune/") for line in lines):
            return [path for path in _nested(lines) if path]
    return []


def _nested(lines: list[str]) -> Iterator[str]:
    above: list[tuple[int, str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        name = re.split(r"\s{2,}|\s#", line.strip())[0].strip()
        while above and above[-1][0] >= indent:
            above.pop()
        prefix = above[-1][1] if above else ""
        yield prefix + name
        if name.endswith("/"):
            above.append((indent, prefix + name))


def test_readme_has_commands_and_each_of_them_parses() -> None:
    lines = [line for line in shell_lines(README.read_text(encoding="utf-8")) if line.split()[0] == "selfspec"]
    assert lines, "README.md shows no selfspec command in a ```bash block"
    assert [problem for line in lines for problem in problems(line)] == []


def test_readme_shows_the_whole_chain() -> None:
    lines = [line.split() for line in shell_lines(README.read_text(encoding="utf-8"))]
    shown = {words[1] for words in lines if words[0] == "selfspec" and len(words) > 1}
    assert {"train", "sweep-exit", "regress", "decode"} <= shown


def test_readme_names_only_make_targets_and_scripts_that_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    shown: set[str] = set()
    for line in shell_lines(README.read_text(encoding="utf-8")):
        words = words_of(line)
        if words[:1] == ["make"]:
            named = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
            assert [w for w in named if w not in targets] == [], line
            shown.update(named)
        for word in words:
            if word.endswith((".py", ".sh", ".yaml")) and "/" in word:
                assert (ROOT / word).is_file(), f"{line!r} names {word}, which does not exist"
    assert {"demo", "test"} <= shown


def test_the_file_tree_names_only_existing_paths() -> None:
    paths = tree_paths(README.read_text(encoding="utf-8"))
    assert len(paths) > 5, "README.md has no file tree"
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "line",
    [
        "selfspec fly MODEL",
        "selfspec decode MODEL --no-such-option",
        "selfspec decode MODEL --exit-layer",
        "selfspec decode MODEL another",
        "selfspec --no-such-option",
    ],
)
def test_a_wrong_command_is_seen(line: str) -> None:
    assert problems(line) != []


@pytest.mark.parametrize(
    "line",
    [
        "selfspec --help",
        "selfspec decode MODEL --prompt 'def f(x):' --json | tail > out.txt",
        "selfspec decode MODEL --no-speculation --stop=END < prompt.txt  # plainly",
        "selfspec sweep-exit MODEL --prompts prompts.jsonl",
    ],
)
def test_a_right_command_is_let_through(line: str) -> None:
    assert problems(line) == []


def test_the_tree_is_read_in_both_styles() -> None:
    expected = ["Makefile", "selfspec_tune/", "selfspec_tune/cli/", "selfspec_tune/cli/console.py", "tests/"]
    plain = "Makefile  all\nselfspec_tune/\n  cli/  one file a command\n    console.py  # draws\ntests/\n"
    drawn = "├── Makefile  all\n├── selfspec_tune/\n│   └── cli/\n│       └── console.py\n└── tests/\n"
    for body in (plain, drawn):
        assert tree_paths(f"text\n```text\n{body}```\n") == expected
