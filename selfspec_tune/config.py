"""Every option of every command, declared once: name, type, default and help live on a frozen dataclass.

The string under an attribute is its help text. A config is built from layers, later ones winning: defaults, a YAML
recipe, `--set key=value`, flags. Unknown keys get a did-you-mean. This module imports no torch and knows no command.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from selfspec_tune.errors import UserError, did_you_mean

Numerics = Literal["exact", "fast"]
Drafter = Literal["layer-skip", "low-precision", "copy", "exit-head", "hybrid"]
HybridWith = Literal["low-precision", "layer-skip", "exit-head"]
DraftGroup = Literal["32", "64"]
KPolicy = Literal["fixed", "window", "cost"]
ProfileSource = Literal["generated", "reference"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

C = TypeVar("C")

MAX_DRAFT_TOKENS = 8
"""Largest k. Exact numerics certify row counts for calls of k + 1 rows; one limit keeps them the same for every k."""

MAX_DRAFT_VOCAB = 32768
"""Most tokens `selfspec draft-vocab` keeps."""


@dataclass(frozen=True)
class ModelConfig:
    """How a model is loaded; shared by every command."""

    dtype: Dtype = "auto"
    """Weight dtype. auto: the checkpoint's own."""
    device: str = "auto"
    """Device, such as cpu or cuda:0. auto: cuda where there is one, else cpu."""


@dataclass(frozen=True)
class PromptConfig(ModelConfig):
    """How prompts are read from JSONL records; shared by the commands that decode."""

    prompt_field: str = "prompt"
    """Field of a JSONL record that holds the prompt text."""
    messages_field: str = "messages"
    """Field of a JSONL record that holds chat messages; used where the record has it."""
    id_field: str = "id"
    """Field that identifies a JSONL record; its number in the file, from 0, where it is missing."""
    raw: bool = False
    """Give prompts to the model as they are, without the chat template."""


@dataclass(frozen=True)
class DecodeConfig(PromptConfig):
    """Options of `selfspec decode`."""

    prompt: str | None = None
    """The prompt as text. With no prompt, prompt file or input, standard input is read."""
    prompt_file: Path | None = None
    """A UTF-8 file holding one prompt."""
    input: Path | None = None
    """JSONL with one record per prompt."""
    output: Path | None = None
    """JSONL written with one record per input record; ids already in it are skipped."""
    max_new_tokens: int = 256
    """Tokens to generate at most, per prompt."""
    stop: tuple[str, ...] = ()
    """Stop at this text, which is not part of the completion. May be repeated."""
    temperature: float = 0.0
    """0 decodes greedily; above 0 samples."""
    top_k: int = 0
    """Sample from the k most probable tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches p."""
    seed: int = 0
    """Seed of the sampling noise. The ratio test draws by rounds: for the same text at every k, see --reproducible."""
    reproducible: bool = False
    """Draw with noise keyed by seed, record id and position: the same text with speculation on or off."""
    drafter: Drafter | None = None
    """How to draft; overrides selfspec.json. hybrid: copy where there is a match, else what --hybrid-with says."""
    exit_layer: int | None = None
    """Layers the draft runs (1 <= E < number of layers); overrides selfspec.json. low-precision: all by default."""
    num_draft_tokens: int | None = None
    """Tokens drafted per round, with --k-policy cost at most; overrides selfspec.json."""
    k_policy: KPolicy | None = None
    """cost: as many as pay (default). window: k follows acceptance. fixed: k (default with --num-draft-tokens)."""
    draft_bits: Literal["4", "8"] | None = None
    """low-precision: bits of the layers' weights. Default: selfspec.json's, else 4."""
    draft_head_bits: Literal["4", "8", "16"] | None = None
    """low-precision: bits of the LM head's weights; 16: the model's own. Default: selfspec.json's, else 8."""
    draft_group: DraftGroup | None = None
    """low-precision: weights with one scale and minimum in 4 bits, by default 32; 64 reads fewer bytes."""
    draft_vocab: int | None = None
    """Draft only the N most frequent tokens of draft_vocab.json (see `selfspec draft-vocab`), from a copy of their rows
    of the LM head. Default: selfspec.json's, else all."""
    hybrid_with: HybridWith | None = None
    """hybrid: the drafter asked where there is nothing to copy. Default: selfspec.json's, else low-precision."""
    numerics: Numerics | None = None
    """exact: equal to plain decoding bit for bit. fast: the cheapest shapes. Default: selfspec.json's, else exact."""
    no_speculation: bool = False
    """Decode plainly, one token a step."""
    batch_size: int = 1
    """Prompts of --input decoded together."""
    no_graphs: bool = False
    """Do not record rounds as CUDA graphs: slower, for finding out whether a graph is at fault."""
    compile: bool = False
    """Let torch.compile fuse the layers' small operations; needs --numerics fast. The first run takes minutes."""
    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True)
class DraftVocabConfig(PromptConfig):
    """Options of `selfspec draft-vocab`."""

    text: tuple[Path, ...] = ()
    """Text to count (.txt or .jsonl). Of a prompt and its completion, the completion counts. May be repeated."""
    text_field: str = "text"
    """Field that holds the text in JSONL."""
    prompts: Path | None = None
    """JSONL of prompts; the model's own greedy answers are counted."""
    num_prompts: int = 64
    """Prompts to answer at most, from the start of the file."""
    max_new_tokens: int = 256
    """Tokens decoded at most per prompt."""
    size: int = MAX_DRAFT_VOCAB
    """Tokens to keep at most, special ones included."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True)
class CheckConfig(ModelConfig):
    """Options of `selfspec check`."""

    batch_size: int = 1
    """Sequences per call."""
    live_length: int = 700
    """Longest cache length tested."""
    json: bool = False
    """Print one JSON object instead of a table."""


DEFAULT_EXITS = {"layer-skip": (0.2, 0.33, 0.5, 0.7), "exit-head": (0.33,)}
"""Exits of `selfspec train` where none are given, by method."""


@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    """Options of `selfspec train`: early-exit continued pretraining, or a head on a frozen model."""

    model: str | None = None
    """Checkpoint to start from: a directory or a hub name."""
    output: Path | None = None
    """Directory the result is written to. A head may go into the model's own; elsewhere the model's files join it."""
    method: Literal["layer-skip", "exit-head"] = "layer-skip"
    """layer-skip: train the model's own layers. exit-head: leave the model as it is, train a layer after one exit."""
    dtype: Dtype = "auto"
    """Dtype of the saved weights; trained ones are kept in fp32 meanwhile. auto: that of the model trained from."""
    lora_rank: int = 0
    """layer-skip: train low-rank adapters of this rank through peft, merged when saved; 0 trains the weights."""
    lora_alpha: float = 32.0
    """Scale of the adapters: what they add is multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Matrices that get an adapter: all-linear (all of the layers), names such as q_proj, embed_tokens, lm_head. May be
    repeated."""
    train_data: tuple[str, ...] = ()
    """Training data: .txt, .jsonl, .parquet, or a hub name (NAME, NAME:SPLIT, NAME:CONFIG:SPLIT). May be repeated."""
    eval_data: tuple[str, ...] = ()
    """Held-out data, never trained on. Without it, one record in 50 of the training data is held out."""
    general_data: tuple[str, ...] = ()
    """Held-out general text whose perplexity must stay within the budget too. May be repeated."""
    max_perplexity_increase: str = "2%"
    """Budget: largest rise of full-depth perplexity over the base, on held-out and on general text each, for a
    checkpoint to be kept."""
    over_budget: Literal["stop", "lower", "shrink"] = "stop"
    """When an evaluation is over the budget. stop: end with the best checkpoint within it. lower: go back to that one
    and halve the exits' share of the loss. shrink: go on, and at the end take back as much of what was trained as the
    budget needs, by interpolating with the base."""
    text_field: str = "text"
    """Field that holds the text. Records with prompt and completion instead are trained on the completion."""
    messages_field: str = "messages"
    """Field that holds chat messages; used where a record has it, through the chat template."""
    assistant_only: bool = False
    """Of chat messages, train on what the assistant says only; the rest is read."""
    no_packing: bool = False
    """One record per sequence, cut or padded to its length, instead of sequences packed from many records."""
    streaming: bool = False
    """Read training data while training, through a shuffle buffer, instead of all of it at the start."""
    skip_bad_records: bool = False
    """Count and list records that cannot be used, and go on without them."""
    sequence_length: int = 512
    """Tokens per training sequence."""
    batch_size: int = 4
    """Sequences per step and process."""
    gradient_accumulation: int = 1
    """Forward passes on training data per optimiser step."""
    max_steps: int = 100
    """Optimiser steps to train for."""
    max_minutes: float | None = None
    """Finish early after this many minutes of steps and evaluations, those before a resume included."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    warmup_steps: int = 10
    """Steps of linear warm-up before the cosine decay to a tenth of the peak."""
    weight_decay: float = 0.0
    """AdamW weight decay on matrices."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    exits: tuple[float, ...] | None = None
    """Exit layers, as numbers or fractions of depth [default: 0.2,0.33,0.5,0.7; the one of exit-head: 0.33]."""
    exits_per_step: int = 1
    """How many exits are trained at one step."""
    exit_curriculum: Literal["rotational", "gradual"] = "rotational"
    """rotational: the exits take turns. gradual: the last exit first, then an earlier one more every --max-steps / 2n
    steps, so all n by half of them."""
    exit_loss_weight: float = 0.5
    """Share of the loss given to the exits; the final layer gets the rest."""
    exit_weights: Literal["uniform", "linear", "quadratic"] = "uniform"
    """How the exits' share is divided among those of a step: evenly, or by depth or depth squared."""
    exit_loss: Literal["kl", "ce", "tv", "mixture"] = "kl"
    """kl: match the final layer's distribution. tv: total variation, one minus the acceptance rate. mixture: kl first,
    more of tv as acceptance rises. ce: predict the data."""
    anchor_weight: float = 0.0
    """Share of the final layer's loss that is KL to the base's distribution instead of the data. With LoRA the base is
    the same weights; without, every device keeps a frozen copy: 2 bytes a weight under bf16, else 4, frozen embeddings
    left out."""
    anchor_data: tuple[str, ...] = ()
    """General text on which only the final layer is trained, to stay as the base is (KL), in a pass of its own at every
    step. Records that perplexity is measured on are left out. Takes the memory of --anchor-weight. May be repeated."""
    anchor_batch_size: int = 1
    """Sequences of --anchor-data per step and process, besides those of --batch-size."""
    anchor_data_weight: float = 1.0
    """Weight of that pass's loss, beside the loss on the training data."""
    layer_dropout: float = 0.1
    """Largest probability that a layer is dropped at a step, p_max."""
    dropout_schedule: Literal["exponential", "uniform"] = "exponential"
    """exponential: from 0 at the first layer to p_max at the last. uniform: p_max at every layer."""
    freeze_embeddings: bool = False
    """Leave embeddings and LM head as they are; saves time and memory, and disturbs the model less in a short run."""
    mixed_precision: Literal["auto", "bf16", "no"] = "auto"
    """bf16: autocast; trained weights stay fp32. auto: where the device has bf16 arithmetic."""
    gradient_checkpointing: bool = False
    """Trade time for memory by recomputing activations."""
    cache_targets: Path | None = None
    """exit-head: keep the model's hidden states in this directory, 4 d bytes a token in 16 bits (d: hidden size)."""
    eval_every: int = 50
    """Steps between evaluations of held-out perplexity and alpha per exit."""
    eval_sequences: int = 16
    """Held-out sequences per evaluation."""
    save_every: int = 50
    """Steps between resumable states."""
    seed: int = 0
    """Seed of data order, layer dropout and exits."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Log there too; metrics.jsonl is always written. wandb works offline with WANDB_MODE=offline."""
    json: bool = False
    """Print one JSON object at the end instead of a table."""

    @property
    def chosen_exits(self) -> tuple[float, ...]:
        """Exits as given, or the method's default."""
        return DEFAULT_EXITS[self.method] if self.exits is None else self.exits


@dataclass(frozen=True)
class SweepConfig(PromptConfig):
    """Options of `selfspec sweep-exit`."""

    prompts: Path | None = None
    """JSONL of held-out prompts; 200 to 500 are advised."""
    num_prompts: int = 200
    """Prompts to profile at most, from the start of the file; the next few serve to confirm."""
    task_field: str = "task"
    """Field that names a record's domain; where records have it, domains are compared."""
    source: ProfileSource = "generated"
    """Text profiled: the model's own continuations, or reference answers, without generating and approximate."""
    reference_field: str = "completion"
    """Field of the reference answer; of chat messages the last, if it is the assistant's."""
    max_new_tokens: int = 96
    """Tokens of a continuation profiled per prompt."""
    temperature: float = 0.0
    """Temperature of the traffic to be served; 0 is greedy."""
    top_k: int = 0
    """top-k of the traffic to be served; 0 for all."""
    top_p: float = 1.0
    """top-p of the traffic to be served."""
    seed: int = 0
    """Seed of the sampled continuations."""
    max_draft_tokens: int = 8
    """Largest k scored."""
    window: tuple[float, float] = (0.3, 0.8)
    """Exits chosen from, as fractions of depth; every exit is profiled all the same."""
    numerics: Numerics = "exact"
    """Numerics the costs are measured in."""
    context_lengths: tuple[int, ...] = (128, 1024, 4096)
    """Live cache lengths at which costs are measured, as far as the model's context holds them."""
    batch_sizes: tuple[int, ...] = (1,)
    """Batch sizes at which costs are shown; the choice is for 1."""
    costs: Path | None = None
    """JSON file of measured costs: read if it exists, else written. For runs on the same machine."""
    repeats: int = 15
    """Interleaved repeats per measured cost."""
    drafters: tuple[Drafter, ...] = ("layer-skip", "copy", "low-precision", "exit-head", "hybrid")
    """Drafters compared, as a list with commas; exit-head only where the checkpoint has one."""
    draft_vocab: tuple[int, ...] = (4096, 16384)
    """Sizes of the draft vocabulary tried where draft_vocab.json is beside the checkpoint, for each drafter's best."""
    confirm: int = 3
    """How many of the best drafters to confirm by really decoding against plain decoding; 0 for none."""
    report: Path | None = None
    """Directory for a report: index.html with plots, PNGs, sweep.json."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True)
class RegressConfig(PromptConfig):
    """Options of `selfspec regress`."""

    base: str | None = None
    """The checkpoint the model was trained from. Default: the one that MODEL/training.json names."""
    text: tuple[Path, ...] = ()
    """Held-out text (.txt or .jsonl) for perplexity, a text set each. A JSONL record is a document; of a .txt file each
    window counts as one. May be repeated."""
    text_field: str = "text"
    """Field that holds the text in JSONL."""
    max_documents: int = 64
    """Documents scored at most per file, spread evenly over it. The more, the more often the gate can decide."""
    window_length: int = 512
    """Tokens per window and its stride: windows do not overlap, and the first token of each is not scored. No BOS token
    is added that the tokenizer does not add."""
    max_windows: int = 1
    """Windows of one document scored at most, from its start; the rest of a longer document is cut off. More documents
    narrow the interval more than more windows do."""
    max_perplexity_increase: str = "2%"
    """Largest allowed rise of perplexity over the base, such as 2% or 0.02. Decided on the ratio's 95 % interval, for
    each text set and for all together: above the limit failed, below passed, across it undecided."""
    tasks: tuple[str, ...] = ()
    """Downstream tasks (names of lm-eval, local .jsonl files), with commas. May be repeated. Needs the extra eval."""
    max_task_drop: str = "1%"
    """Largest allowed fall of a task's score, such as 1% or 0.01 for one point of accuracy; decided on its interval."""
    task_limit: int | None = None
    """Documents per task at most, the first ones."""
    prompts: Path | None = None
    """JSONL of held-out prompts for losslessness."""
    num_prompts: int = 12
    """Prompts to use at most, from the start of the file."""
    max_new_tokens: int = 96
    """Tokens decoded per prompt."""
    exit_layers: tuple[int, ...] = ()
    """Exit layers of layer skip tested. Default: the drafter in selfspec.json, else four exits over the depth."""
    num_draft_tokens: tuple[int, ...] = ()
    """Draft lengths tested. Default: 1 and those of selfspec.json, k and k_max, else 1, 3 and 7."""
    numerics: Numerics | None = None
    """Numerics to test losslessness in. Default: selfspec.json's, else exact."""
    sampling_texts: int = 1
    """Texts sampled per prompt, drafter and draft length for the test of their distribution; 0: sampling is not tested.
    Besides, one is sampled with noise shared with plain decoding, which it must equal."""
    sampling_temperature: float = 1.0
    """Temperature of the sampled texts."""
    sampling_top_p: float = 1.0
    """top-p of the sampled texts."""
    report: Path | None = None
    """Write regress.json and regress.md, to be pasted into a pull request, into this directory."""
    json: bool = False
    """Print one JSON object instead of a table."""


@cache
def field_help(config: type) -> dict[str, str]:
    """Map field name → help text, read from the string under each attribute, base classes included."""
    help_texts: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                help_texts[statement.target.id] = ast.literal_eval(following.value)  # type: ignore[union-attr]
    return help_texts


@cache
def field_types(config: type[Any]) -> dict[str, Any]:
    """Map field name → resolved type."""
    return get_type_hints(config)


def field_defaults(config: type) -> dict[str, Any]:
    """Map field name → default."""
    return {f.name: f.default for f in fields(config) if f.default is not MISSING}


def build(config: type[C], *layers: Mapping[str, Any]) -> C:
    """Merge `layers` (later wins) over the defaults of `config`; bad keys or values are UserErrors."""
    hints: dict[str, Any] = get_type_hints(config)
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            name = str(key).replace("-", "_")
            if name not in hints:
                raise UserError(f"unknown option {key!r}{did_you_mean(name, hints)}", allowed=", ".join(sorted(hints)))
            merged[name] = _coerce(name, value, hints[name])
    return config(**merged)


def parse_assignments(assignments: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """Turn `["key=value", ...]` into a dict; values are read as YAML."""
    import yaml

    parsed: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise UserError("--set needs key=value", got=assignment, command="--set learning_rate=1e-4")
        try:
            parsed[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError("--set has a value that is not valid YAML", got=assignment) from None
    return parsed


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a YAML recipe: a mapping of option names to values."""
    import yaml

    if not path.is_file():
        raise UserError(f"recipe {path} does not exist", command="ls recipes/")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(recipe, dict):
        raise UserError(f"recipe {path} is not a mapping of options", got=type(recipe).__name__)
    return recipe


def parse_share(name: str, text: str) -> float:
    """Turn "2%" or "0.02" into 0.02; `name` is the option's.

    Raises:
        UserError: not a number, negative, or 1 and above without a percent sign (2 is too likely meant as 2%).
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < (math.inf if number.endswith("%") else 1):
        raise UserError(f"{name} is not a share", got=text, allowed="such as 2% or 0.02, not negative")
    return value


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn options into values that JSON and YAML know: paths into text, tuples into lists."""
    as_list = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in as_list.items()}


def as_recipe(values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return options as a YAML recipe, one a line with its source in a comment; `read_recipe` gives the same back.

    Args:
        values: option → a value of `plain`.
        sources: option → where its value comes from.
    """
    import yaml

    lines = []
    for name, value in values.items():
        text = yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True).strip()
        lines.append(f"{name}: {text[1:-1]}  # {sources[name]}")
    return "\n".join(lines)


def flag(name: str) -> str:
    """Return the command line's flag for a field."""
    return "--" + name.replace("_", "-")


def is_listed(element: Any) -> bool:
    """Whether a tuple of such elements is given as one text with commas: numbers and names are, texts and paths not."""
    return element in (int, float) or get_origin(element) is Literal


def _coerce(name: str, value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        return None if value is None else _coerce(name, value, inner[0])
    if value is None:
        raise UserError(f"{name} needs a value")
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{name} has no such value", got=value, allowed=", ".join(map(str, arguments)))
        return value
    if origin is tuple:
        # Text is one element, numbers and names may be given as "3,10,15".
        parts = value.split(",") if isinstance(value, str) and is_listed(arguments[0]) else value
        items = parts if isinstance(parts, list | tuple) else [parts]
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            raise UserError(f"{name} takes {len(arguments)} values", got=value)
        return tuple(_coerce(name, item, arguments[0]) for item in items)
    if hint is bool:
        if not isinstance(value, bool):
            raise UserError(f"{name} is a switch", got=value, allowed="true, false")
        return value
    if hint is int and (isinstance(value, bool) or (isinstance(value, float) and value != int(value))):
        raise UserError(f"{name} is a whole number", got=value)
    try:
        return hint(value)
    except (TypeError, ValueError):
        raise UserError(f"{name} is not a valid {hint.__name__}", got=repr(value)) from None
