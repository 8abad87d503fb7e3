"""`LayeredDecoder`: a causal language model as embed → layers start..stop → final norm and head, over a shared cache.

It knows how many rows a call may have without changing bits (`RowCounts`), and pads calls to such a count. It does not
know what a draft is: the engine decides which layers run on which tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from selfspec_kernels import Mode, compiled, few_row_linear, has_compiled_attention
from torch import Tensor

from selfspec_tune.model import attention, load
from selfspec_tune.model.attention import InterfaceCache, Step
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.families import describe
from selfspec_tune.model.layer import MANY_ROWS, FusedLayer, LayerStack, rms_norm_of, widens
from selfspec_tune.model.rows import ANY_ROWS, RowCounts, repeat_last

PREFILL_CHUNK = 128
"""Prompt tokens per prefill call. Fixed, so that a prompt's bits do not depend on what else is decoded."""

SPARE_POSITIONS = 64
"""Positions beyond the context: a finished row of a batch still drafts there, and nothing of it is kept."""


@dataclass(frozen=True)
class Tap:
    """Sees what passes from layer E - 1 to layer E in every pass that runs both.

    Attributes:
        layer: E, at least 1 and below the number of layers.
        call: `call(hidden [B, T, d], positions [B, T], cache)`, with the real rows of the pass; padding is left out.
    """

    layer: int
    call: Callable[[Tensor, Tensor, SharedKVCache], object]


class LayeredDecoder:
    """Drive a transformers causal language model layer by layer.

    Args:
        model: a supported transformers model in eval mode; its weights are used in place (one copy).
        fused: run our fused layers (the default) or transformers' own layer modules through the attention interface.

    Attributes:
        rows: row counts per sequence that calls are padded to; `ANY_ROWS` pads nothing.
        exact: attention in fixed blocks (True) or over the live span (False).
        tap: a drafter's, for the requests in hand; None for none.
    """

    def __init__(self, model: Any, *, fused: bool = True) -> None:
        self.model = model.requires_grad_(False)
        self.family = describe(model.config)
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.num_layers = self.family.num_layers
        self.rows: RowCounts = ANY_ROWS
        self.exact = True
        self.tap: Tap | None = None
        backbone = model.model
        self._embedding = backbone.embed_tokens
        self.final_norm = rms_norm_of(backbone.norm)
        self.head: tuple[Tensor, Tensor | None] = (model.lm_head.weight, model.lm_head.bias)
        self._rotary = attention.rotary_tables(
            backbone.rotary_emb, self.family.max_context + SPARE_POSITIONS, self.device
        )
        self._layers: list[Any] = list(backbone.layers)
        self.fused = fused
        if fused:
            self._stack = LayerStack([FusedLayer(layer, i, self.family) for i, layer in enumerate(self._layers)])
            self._layers = self._stack.layers
        else:
            attention.register_interface()
            model.set_attn_implementation(attention.INTERFACE_NAME)
            self._cache_argument = _cache_argument(self._layers[0])

    def new_cache(self, batch_size: int = 1, capacity: int = 512) -> SharedKVCache:
        """Make an empty cache for `batch_size` rows, with room for the layers added so far."""
        extra = self.stored_layers - self.num_layers
        return SharedKVCache(self.family, batch_size, capacity, self.dtype, self.device, extra_layers=extra)

    @property
    def stored_layers(self) -> int:
        """Layers that a cache must have room for: the model's L, then those added."""
        return len(self._layers)

    def add_layer(self, module: Any, like: int) -> int:
        """Add a layer that the model's own passes do not run; returns its index, for `run_layers` and the cache.

        Args:
            module: a transformers decoder layer of the model's architecture, dtype and device, used in place.
            like: the layer whose attention window it has.

        Caches made before have no room for it.
        """
        index = len(self._layers)
        if self.fused:
            windows = self.family.windows[: self.num_layers] + (self.family.windows[like],) * (index + 1)
            self._stack.append(FusedLayer(module, index, replace(self.family, windows=windows)))
        else:
            module.self_attn.layer_idx = index
            self._layers.append(module)
        return index

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → hidden states [B, T, d]."""
        return F.embedding(tokens, self._embedding.weight)

    def run_layers(
        self, hidden: Tensor, positions: Tensor, cache: SharedKVCache, start: int, stop: int, *, pad: bool = True
    ) -> Tensor:
        """Run layers start..stop on [B, T, d] at positions [B, T], writing their keys and values.

        With `pad`, the call has a certified number of rows: the last row is repeated, and the copies write nothing.
        Without, it is a prefill: plain and speculative decoding share its results, so any arithmetic is exact.
        A `tap` between two of the layers is called on the way.
        """
        num_rows = hidden.shape[1]
        padded = self.rows.padded(num_rows) if pad else num_rows
        hidden, positions = repeat_last(hidden, padded), repeat_last(positions, padded)
        step = self.step(positions, num_rows, cache, start, stop, many_rows=not pad)
        run = self._stack.run if self.fused else self._run_modules
        if self.tap is not None and start < self.tap.layer < stop:
            hidden = run(hidden, step, start, self.tap.layer)
            self.tap.call(hidden[:, :num_rows], positions[:, :num_rows], cache)
            start = self.tap.layer
        return run(hidden, step, start, stop)[:, :num_rows]

    def step(
        self,
        positions: Tensor,
        num_written: int,
        cache: SharedKVCache,
        start: int,
        stop: int,
        *,
        many_rows: bool = False,
    ) -> Step:
        """Prepare one pass over layers start..stop at positions [B, T], of which the first `num_written` are real."""
        return Step(
            cache,
            positions,
            num_written,
            self._rotary,
            exact=self.exact,
            mode=self.mode(positions.shape[1], many_rows=many_rows),
            start=start,
            stop=stop,
        )

    def mode(self, num_rows: int, *, many_rows: bool) -> Mode:
        """Return the arithmetic of a call of `num_rows` rows per sequence; `many_rows` says that it is a prefill.

        All calls of decoding use one arithmetic. A prefill's results are shared by plain and speculative decoding.
        """
        if many_rows and num_rows >= MANY_ROWS:
            return "wide" if widens(self) else "reference"
        # The head has the device and dtype of the cache.
        attends = self.fused and has_compiled_attention(self.head[0], self.family.head_size)
        return "compiled" if attends else "reference"

    @property
    def layers_compiled(self) -> bool:
        """Whether products are compiled too, so that any number of rows has the same bits; on GPUs they are not."""
        return self.compiled and compiled(self.head[0])

    @property
    def compiled(self) -> bool:
        """Whether the passes of decoding run compiled."""
        return self.mode(1, many_rows=False) == "compiled"

    def compile_layers(self) -> bool:
        """Let torch.compile fuse what stands around the layers' products; returns whether that has an effect.

        Weights stay where they are. On a CPU with compiled ops a whole stack is one call already.
        """
        has_effect = self.fused and not self.layers_compiled
        if has_effect:
            self._stack.compile()
        return has_effect

    def layers(self, start: int, stop: int) -> list[FusedLayer]:
        """Return the fused layers start..stop."""
        assert self.fused
        return self._layers[start:stop]

    def products(self, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        """Return (weight [N, K], bias [N] or None) of every linear product that runs in a layer."""
        if self.fused:
            return self._layers[layer].products()
        linears = [module for module in self._layers[layer].modules() if isinstance(module, torch.nn.Linear)]
        return [(linear.weight, linear.bias) for linear in linears]

    def logits(self, hidden: Tensor, *, pad: bool = True, norm: tuple[Tensor, float] | None = None) -> Tensor:
        """Final norm (or `norm` in its place) and language-model head: [B, T, d] → fp32 [B, T, V]."""
        num_rows = hidden.shape[1]
        padded = self.rows.padded(num_rows) if pad else num_rows
        hidden = repeat_last(hidden, padded)
        mode = self.mode(padded, many_rows=not pad)
        logits = few_row_linear(hidden, *self.head, norm=norm or self.final_norm, out_dtype=torch.float32, mode=mode)
        return logits[:, :num_rows]

    def prefill(self, tokens: Tensor, cache: SharedKVCache) -> Tensor:
        """Run a prompt [1, T] in chunks into a batch-1 cache and commit it; returns its last hidden state [1, 1, d]."""
        hidden = torch.empty(0)
        for chunk in tokens.split(PREFILL_CHUNK, dim=1):
            begin = int(cache.committed[0])
            positions = torch.arange(begin, begin + chunk.shape[1], device=self.device)[None]
            hidden = self.run_layers(self.embed(chunk), positions, cache, 0, self.num_layers, pad=False)
            cache.committed += chunk.shape[1]
        return hidden[:, -1:]

    def _run_modules(self, hidden: Tensor, step: Step, start: int, stop: int) -> Tensor:
        cos, sin = (table[step.positions] for table in step.rotary)
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        embeddings = (cos.to(hidden.dtype), sin.to(hidden.dtype))
        cache = InterfaceCache(step)
        for layer in self._layers[start:stop]:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=step.positions,
                position_embeddings=embeddings,
                selfspec_step=step,
                **{self._cache_argument: cache},
            )
        if cache.updates != stop - start:
            raise RuntimeError(
                f"transformers' layers updated the cache {cache.updates} times in {stop - start} layers: "
                "this transformers version passes its cache under another name"
            )
        return hidden


def load_decoder(name: str, *, dtype: str = "auto", device: str = "auto") -> LayeredDecoder:
    """Load a checkpoint (see `load.load_model`) as a `LayeredDecoder`."""
    return LayeredDecoder(load.load_model(name, dtype=dtype, device=device))


def _cache_argument(layer: Any) -> str:
    """Name under which this transformers version's layers take their cache."""
    names = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    for name in ("cache", "past_key_values", "past_key_value", "layer_past"):
        if name in names:
            return name
    raise RuntimeError(f"no known cache argument in {type(layer).__name__}.forward: {', '.join(names)}")
