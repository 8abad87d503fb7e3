"""Run the whole chain on a real model: get the model, build the corpus, train, sweep-exit, regress, decode.

Every step is the command a user would type, run as a subprocess. The result of each finished step is kept under
`--output` with what it was made from, so a run that was interrupted takes up where it stopped. One table at the end.

    python scripts/demo.py [--output demo-output] [--model DIR] [--set KEY=VALUE …] [--force]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from demo_table import layer_skip, print_table  # type: ignore[import-not-found]  # beside this script when it runs

from selfspec_tune.artifact import FILE_NAME, fingerprint
from selfspec_tune.errors import UserError
from selfspec_tune.files import atomic_writer, read_json, read_jsonl, write_json

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "recipes" / "demo.yaml"
DECODE_PROMPTS, DECODE_TOKENS, DECODE_ROUNDS = 6, 64, 2

Json = dict[str, Any]


def say(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def selfspec() -> str:
    """Return the path of the installed `selfspec` command, first beside this Python."""
    beside = Path(sys.executable).parent / "selfspec"
    found = str(beside) if beside.exists() else shutil.which("selfspec")
    if found is None:
        raise UserError("the selfspec command is not installed", command="make demo")
    return found


def run(command: Sequence[str | Path], *, capture: bool) -> tuple[int, str]:
    """Run a command with stderr inherited; on Ctrl-C give it time to stop by itself. Return (exit code, stdout)."""
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE if capture else sys.stderr, text=True, encoding="utf-8"
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        # The terminal sent the interrupt to the child too.
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return process.returncode, output or ""


def parse_result(output: str) -> Json | None:
    """Return the JSON object a command printed: all of its stdout, or the last line that is one."""
    for text in [output, *reversed(output.splitlines())]:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


class Steps:
    """Runs steps once: a result is kept in `<directory>/<name>.json` together with what it was made from."""

    def __init__(self, directory: Path, *, force: bool) -> None:
        self.directory = directory
        self.force = force

    def run(
        self,
        name: str,
        arguments: Sequence[str | Path],
        inputs: Json,
        made: Sequence[Path],
        *,
        clear: Path | None = None,
        resumes: bool = False,
        outdates: Sequence[str] = (),
    ) -> Json:
        """Return the JSON result of `selfspec <arguments>`; a kept one where `inputs` and `made` allow.

        Args:
            name: names the step and its kept result.
            inputs: what decides the result besides the arguments.
            made: paths the step leaves behind; while one is missing the step is not finished.
            clear: file or directory removed before the step really runs.
            resumes: the step goes on from what it finds there, so clear only what was made from other inputs.
            outdates: steps whose kept results no longer hold once this one really runs.

        Raises:
            UserError: the command failed. `regress` exits with 1 for a verdict that is a result all the same.
        """
        path = self.directory / f"{name}.json"
        key = {"arguments": [str(a) for a in arguments], "inputs": inputs}
        kept = None if self.force or not path.is_file() else read_json(path)
        same = kept is not None and kept.get("key") == key
        if kept is not None and same and "result" in kept and all(p.exists() for p in made):
            say(f"== {name}: done before")
            return dict(kept["result"])
        say(f"== {name}: selfspec {' '.join(str(a) for a in arguments)}")
        if clear is not None and not (resumes and (same or (kept is None and not self.force))):
            if clear.is_dir():
                shutil.rmtree(clear)
            else:
                clear.unlink(missing_ok=True)
        for other in outdates:
            (self.directory / f"{other}.json").unlink(missing_ok=True)
        write_json(path, {"key": key})
        code, output = run([selfspec(), *arguments], capture=True)
        result = parse_result(output)
        if result is None or code not in (0, 1) or (code == 1 and "passed" not in result):
            raise UserError(f"step {name!r} failed with exit code {code}; its message is above")
        write_json(path, {"key": key, "result": result})
        return result


def run_script(name: str, *arguments: str | Path) -> None:
    """Run another script of this directory; both skip what is already there."""
    say(f"== {name.removesuffix('.py')}")
    code, _ = run([sys.executable, SCRIPTS / name, *arguments], capture=False)
    if code != 0:
        raise UserError(f"scripts/{name} failed with exit code {code}; its message is above")


def file_sum(*paths: Path) -> str:
    """Return a short SHA-256 over the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def decode_in_turn(steps: Steps, model: Path, prompts: Path, sweep: Json, inputs: Json) -> Json:
    """Decode the same prompts plainly, as the sweep chose, and with trained layer skip forced; compare the texts.

    Returns medians of tokens/s by mode, the settings of layer skip, and how many prompts have the same text in all.
    """
    first = steps.directory / "decode-prompts.jsonl"
    records = read_jsonl(prompts)[:DECODE_PROMPTS]
    with atomic_writer(first) as handle:
        handle.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    artifact, forced = sweep.get("artifact") or {}, layer_skip(sweep) or {}
    modes: dict[str, list[str]] = {"plain": ["--no-speculation"]}
    if artifact.get("enabled"):
        modes["chosen"] = []
    if forced:
        cell = str(forced["exit_layer"]), str(forced["num_draft_tokens"])
        modes["layer-skip"] = ["--drafter", "layer-skip", "--exit-layer", cell[0], "--num-draft-tokens", cell[1]]
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    texts: list[dict[str, str]] = []
    for number in range(1, DECODE_ROUNDS + 1):
        for mode, flags in modes.items():
            name = f"decode-{mode}-{number}"
            output = steps.directory / f"{name}.jsonl"
            command: list[str | Path] = ["decode", model, "--input", first, "--output", output, "--raw", "--json"]
            command += ["--max-new-tokens", str(DECODE_TOKENS), *flags]
            # A partial output is cleared: decode would resume it, and time only what is left.
            stats = steps.run(name, command, inputs, [output], clear=output)
            if isinstance(stats.get("tokens_per_second"), int | float):
                speeds[mode].append(float(stats["tokens_per_second"]))
            texts.append({str(r.get("id")): str(r.get("completion")) for r in read_jsonl(output)})
    equal = sum(len({text.get(str(record["id"])) for text in texts}) == 1 for record in records)
    medians = {mode: median(values) if values else None for mode, values in speeds.items()}
    setting = {name: forced.get(name) for name in ("exit_layer", "num_draft_tokens")}
    return {**medians, **setting, "equal": equal, "prompts": len(records)}


def chain(options: argparse.Namespace) -> dict[str, Json]:
    """Run all steps and return their results by name."""
    output: Path = options.output
    steps = Steps(output / "results", force=options.force)
    corpus, trained = output / "corpus", output / "trained"
    model = options.model or output / "model"
    if options.model is None:
        run_script("get_demo_model.py", "--output", model)
    run_script("demo_corpus.py", "--output", corpus)
    train_text, heldout, prompts = (corpus / f"{name}.jsonl" for name in ("train", "heldout", "prompts"))

    command = ["train", RECIPE, "--model", model, "--output", trained, "--json"]
    command += ["--train-data", train_text, "--eval-data", heldout]
    for assignment in options.set:
        command += ["--set", assignment]
    base, texts = fingerprint(model), file_sum(train_text, heldout, RECIPE)
    inputs: Json = {"base": base, "texts": texts}
    results = {"train": steps.run("train", command, inputs, [trained / "config.json"], clear=trained, resumes=True)}

    inputs = {"base": base, "trained": fingerprint(trained), "texts": file_sum(heldout, prompts)}
    command = ["sweep-exit", trained, "--prompts", prompts, "--raw", "--json"]
    command += ["--num-prompts", "8", "--max-new-tokens", "48", "--repeats", "7", "--confirm", "3"]
    command += ["--context-lengths", "128,512"]
    # The sweep writes the artifact anew; the verdict of regress has to be put into it again.
    results["sweep"] = steps.run("sweep-exit", command, inputs, [trained / FILE_NAME], outdates=["regress"])
    command = ["regress", trained, "--base", model, "--text", heldout, "--prompts", prompts, "--raw", "--json"]
    command += ["--num-prompts", "4", "--max-new-tokens", "48", "--num-draft-tokens", "3"]
    # The interval of 24 documents is about ±1.2 %: enough to decide on 2 % where training did not hurt.
    command += ["--max-documents", "24", "--max-windows", "1"]
    inputs = {**inputs, "sweep": results["sweep"].get("artifact")}
    results["regress"] = steps.run("regress", command, inputs, [trained / FILE_NAME])
    results["decode"] = decode_in_turn(steps, trained, prompts, results["sweep"], inputs)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the chain, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Train, sweep, regress and decode on the demo model and corpus.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="[default: %(default)s]")
    parser.add_argument("--model", type=Path, help="a checkpoint directory to use instead of the demo model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override the training recipe")
    parser.add_argument("--force", action="store_true", help="run every step again, training included")
    options = parser.parse_args(arguments)
    try:
        results = chain(options)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}: {error.filename}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; run it again to go on from here")
        return 130
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
