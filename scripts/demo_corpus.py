"""Build the demo corpus from the standard library of the Python that runs this script.

Writes to DIR: `train.jsonl` ({"id", "text"}, one module each), `heldout.jsonl` (the same in pieces, so that its first
lines already come from many modules; ids "module#piece") and `prompts.jsonl` ({"id", "prompt", "task": "code"}), whose
prompts are the heads of functions in held-out modules. Modules are split by the hash of their name, a module and its
twins (`io`, `_io`, `_pyio`) on one side, so that nothing held out is ever trained on. All files are in hash order.
The same Python gives the same bytes; a second run does nothing.

    python scripts/demo_corpus.py --output DIR [--num-prompts 48] [--max-modules N] [--force]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from selfspec_tune.errors import UserError
from selfspec_tune.files import atomic_writer, read_json, write_json

BUILDER_VERSION = 1
MANIFEST_NAME = "corpus.json"
FILE_NAMES = ("train.jsonl", "heldout.jsonl", "prompts.jsonl")
HELD_OUT_PERCENT = 15
PIECE = 4_000  # characters of a held-out record, about
# Tests, third-party code, generated tables and code kept for compatibility only.
SKIPPED_DIRECTORIES = {
    "__pycache__", "_bundled", "dist-packages", "encodings", "idle_test", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")
SMALLEST_MODULE, LARGEST_MODULE = 400, 300_000  # characters
CHARACTERS_PER_FUNCTION = 8_000  # a module with less code than that is a table
MOST_CONTEXT_LINES = 40
SHORTEST_PROMPT, LONGEST_PROMPT = 260, 820  # characters; code has 3 to 4 of them in a token
FEWEST_BODY_LINES = 4  # after the docstring, so that there is something to complete


def module_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted module name, source text) for every module under `root` worth learning from, in name order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_DIRECTORIES.intersection(parts[:-1]) or any(p.startswith(SKIPPED_PREFIXES) for p in parts):
            continue
        try:
            with tokenize.open(path) as handle:
                text = handle.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if SMALLEST_MODULE <= len(text) <= LARGEST_MODULE and not _is_table(text):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), text


def _is_table(text: str) -> bool:
    functions = sum(line.lstrip().startswith(("def ", "async def ")) for line in text.splitlines())
    digits = sum(character.isdigit() for character in text)
    return functions == 0 or len(text) / functions > CHARACTERS_PER_FUNCTION or digits > len(text) / 10


def is_held_out(module: str) -> bool:
    """Return whether `module` is held out; decided by its first two names, each without `_` or `_py` in front."""
    family = ".".join(part.removeprefix("_py").lstrip("_") for part in module.split(".")[:2])
    return _digest(family) % 100 < HELD_OUT_PERCENT


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def function_heads(module: str, text: str) -> list[dict[str, str]]:
    """Return the prompts of one module: source above a function, its `def` line and its docstring."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")  # as the parser counts them; splitlines() also splits at form feeds
    found = []
    for name, node in _functions(tree, ""):
        prompt = _head(lines, node)
        if prompt is not None:
            found.append({"id": f"{module}:{name}:{node.lineno}", "prompt": prompt, "task": "code"})
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _functions(child, prefix)


def _head(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return the prompt for one function; None where it would be too short, too long or leave nothing to write."""
    rest = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not rest:
        return None
    first = min([rest[0].lineno, *(d.lineno for d in getattr(rest[0], "decorator_list", []))])
    if (node.end_lineno or 0) - first + 1 < FEWEST_BODY_LINES or first == node.lineno:
        return None
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    # Comments between head and body belong to the completion.
    end = (node.body[0].end_lineno or first) if rest is not node.body else _end_of_signature(lines, node, first)
    lowest = max(0, start - MOST_CONTEXT_LINES)
    sizes = [len(line) + 1 for line in lines[lowest:end]]
    starts = [s for s in range(lowest, start + 1) if SHORTEST_PROMPT < sum(sizes[s - lowest :]) <= LONGEST_PROMPT]
    if not starts:
        return None
    # Begin after a blank line, so that the context opens with a whole statement, where there is one.
    start = next((s for s in starts if s == 0 or not lines[s - 1].strip()), starts[0])
    # No newline at the end: a tokenizer merges it with the indentation that follows.
    prompt = "\n".join(lines[start:end]).strip("\n").rstrip()
    begins_inside_string = prompt.count('"""') % 2 == 1
    return prompt if len(prompt) >= SHORTEST_PROMPT and not begins_inside_string else None


def _end_of_signature(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, first: int) -> int:
    end = first - 1
    while end > node.lineno and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


def choose_prompts(candidates: Iterable[list[dict[str, str]]], count: int) -> list[dict[str, str]]:
    """Take `count` prompts in turn from each module's list, in hash order, so that many modules are represented."""
    queues = [sorted(group, key=lambda prompt: _digest(prompt["id"]), reverse=True) for group in candidates if group]
    queues.sort(key=lambda queue: _digest(queue[0]["id"].partition(":")[0]))
    chosen: list[dict[str, str]] = []
    seen: set[str] = set()
    while queues and len(chosen) < count:
        for queue in queues:
            prompt = queue.pop()
            if prompt["prompt"] not in seen and len(chosen) < count:
                seen.add(prompt["prompt"])
                chosen.append(prompt)
        queues = [queue for queue in queues if queue]
    return chosen


def _pieces(module: dict[str, str]) -> Iterator[dict[str, str]]:
    """Cut a module at line ends into records of at least PIECE characters, except for the last."""
    number, piece, size = 0, [], 0
    for line in module["text"].splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= PIECE:
            yield {"id": f"{module['id']}#{number}", "text": "".join(piece)}
            number, piece, size = number + 1, [], 0
    if piece:
        yield {"id": f"{module['id']}#{number}", "text": "".join(piece)}


def build(output: Path, num_prompts: int, max_modules: int | None) -> dict[str, Any]:
    """Write the three files and the manifest into `output` and return the manifest.

    Raises:
        UserError: this Python has no standard library in source form, or one split came out empty.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(module_sources(root), key=lambda module: _digest(module[0]))
    if not modules:
        raise UserError(f"no standard library source files under {root}")
    if max_modules is not None:
        modules = modules[:max_modules]
    splits: dict[bool, list[dict[str, str]]] = {False: [], True: []}
    for name, text in modules:
        splits[is_held_out(name)].append({"id": name, "text": text})
    pieces = sorted((p for m in splits[True] for p in _pieces(m)), key=lambda piece: _digest(piece["id"]))
    prompts = choose_prompts((function_heads(m["id"], m["text"]) for m in splits[True]), num_prompts)
    if not splits[False] or not prompts:
        raise UserError("too few modules to fill both splits: raise --max-modules")
    (output / MANIFEST_NAME).unlink(missing_ok=True)
    for name, records in zip(FILE_NAMES, (splits[False], pieces, prompts), strict=True):
        with atomic_writer(output / name) as handle:
            handle.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    manifest = _key(num_prompts, max_modules)
    manifest["counts"] = {
        "train": {"modules": len(splits[False]), "characters": sum(len(m["text"]) for m in splits[False])},
        "heldout": {
            "modules": len(splits[True]),
            "pieces": len(pieces),
            "characters": sum(len(m["text"]) for m in splits[True]),
        },
        "prompts": {"prompts": len(prompts), "modules": len({p["id"].partition(":")[0] for p in prompts})},
    }
    manifest["sha256"] = {name: _sha256(output / name) for name in FILE_NAMES}
    write_json(output / MANIFEST_NAME, manifest)
    return manifest


def _key(num_prompts: int, max_modules: int | None) -> dict[str, Any]:
    """Return what decides the contents: the builder, this Python, the options."""
    python = f"{platform.python_implementation()} {sys.version}"
    return {"builder": BUILDER_VERSION, "python": python, "num_prompts": num_prompts, "max_modules": max_modules}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finished(output: Path, num_prompts: int, max_modules: int | None) -> dict[str, Any] | None:
    """Return the manifest in `output` where it is this Python's and its files are as they were written, else None."""
    try:
        manifest = read_json(output / MANIFEST_NAME)
        key = _key(num_prompts, max_modules)
        same = all(manifest[name] == value for name, value in key.items())
        whole = all(_sha256(output / name) == manifest["sha256"][name] for name in FILE_NAMES)
    except (UserError, OSError, KeyError, TypeError):
        return None
    return manifest if same and whole else None


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, build, print the counts, and return the exit code."""
    parser = argparse.ArgumentParser(description="Build a code corpus from this Python's standard library.")
    parser.add_argument("--output", type=Path, required=True, help="directory the three JSONL files are written to")
    parser.add_argument("--num-prompts", type=int, default=48, help="prompts to write [default: 48]")
    parser.add_argument("--max-modules", type=int, default=None, help="use this many modules only [default: all]")
    parser.add_argument("--force", action="store_true", help="build again even if the corpus is there")
    options = parser.parse_args(arguments)
    for name in ("num_prompts", "max_modules"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        manifest = None if options.force else finished(options.output, options.num_prompts, options.max_modules)
        if manifest is not None:
            print(f"{options.output} is complete")
        else:
            manifest = build(options.output, options.num_prompts, options.max_modules)
            print(f"wrote {options.output}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, counts in manifest["counts"].items():
        print(f"  {name}: " + ", ".join(f"{number} {unit}" for unit, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
