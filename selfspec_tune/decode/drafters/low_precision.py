"""Low precision: the model's own layers and head, their weights quantised to 8 or 4 bits, draft.

Weight-only on CUDA, and as good as that on CPUs, where products round their inputs to 16 bits by blocks of 32 (compare
QSpec, arXiv 2410.11305). The full-precision weights verify from layer 0 and overwrite the draft's keys and values, so
the prefix that every draft reads is exact and there is no second cache. The draft is no target arithmetic: none of its
calls is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from selfspec_kernels import GROUP, GROUPS, PackedWeight, has_packed_product, pack, packed_bytes
from torch import Tensor

from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.decode.drafters.draft_head import DraftHead
from selfspec_tune.decode.drafters.packing import PackWhereFaster
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.layer import LayerStack

BITS, HEAD_BITS = (4, 8), (4, 8, 16)


class LowPrecisionDrafter(Drafter):
    """Draft with quantised copies of layers 0..E and of the head.

    Args:
        decoder: the model.
        bits: of the layers' weights, 4 or 8.
        head_bits: of the head's: 8 unless asked otherwise, as four bits lose more acceptance there than in any layer
            (on SmolLM2-135M 0.07); 16 leaves it as it is.
        exit_layer: E; None for all layers.
        group: weights that share a scale and a minimum in 4 bits, 32 or 64.
        vocab: [N] ids the draft may propose, see `DraftHead`; None for all.
        measure: pack only weights whose products are then faster, which takes some seconds. By default not on a CPU,
            where the compiled packed product is known to be faster.

    Attributes:
        num_bytes: memory the copies take.
        kept: shapes [N, K] of weights that were measured and are not packed.

    Raises:
        UserError: no fast packed product for this device and dtype, an unknown number of bits, or too little memory.
    """

    name = "low-precision"
    reads_text = False

    def __init__(
        self,
        decoder: LayeredDecoder,
        bits: int = 4,
        head_bits: int = 8,
        exit_layer: int | None = None,
        vocab: Tensor | None = None,
        *,
        group: int = GROUP,
        measure: bool | None = None,
    ) -> None:
        for name, value, allowed in (("--draft-bits", bits, BITS), ("--draft-head-bits", head_bits, HEAD_BITS)):
            if value not in allowed:
                known = ", ".join(map(str, allowed))
                raise UserError("a draft cannot have so many bits", got=value, allowed=known, command=f"{name} 8")
        if exit_layer is not None and not 1 <= exit_layer <= decoder.num_layers:
            raise UserError("exit_layer is out of range", got=exit_layer, allowed=f"1..{decoder.num_layers}")
        if not has_packed_product(decoder.head[0]):
            raise UserError(
                "low-precision drafts have no fast product for this device and dtype",
                got=f"{decoder.device}, {decoder.dtype}",
                allowed="float32, bfloat16: a CPU with numba; these and float16: CUDA with triton",
                command="CPU: pip install 'selfspec[cpu]', CUDA: pip install 'selfspec[cuda]', or another --drafter",
            )
        if group not in GROUPS:
            raise UserError("no such group of weights", got=group, allowed="32, 64", command="--draft-group 32")
        self.decoder, self.exit_layer, self.group = decoder, exit_layer, group
        check_memory(
            estimate_bytes(decoder, bits, head_bits, exit_layer, None if vocab is None else len(vocab), group),
            decoder.device,
        )
        last = exit_layer or decoder.num_layers
        if measure is None:
            measure = decoder.device.type != "cpu"
        smaller = self._packing(bits, measure=measure)
        self.stack = LayerStack([layer.with_weights(smaller) for layer in decoder.layers(0, last)])
        pack_head = None if head_bits == 16 else self._packing(head_bits, measure=measure)
        self.head = DraftHead(decoder, vocab, pack=pack_head)
        measured = [packing for packing in (smaller, pack_head) if isinstance(packing, PackWhereFaster)]
        self.kept = [shape for packing in measured for shape in packing.kept]

    def _packing(self, bits: int, *, measure: bool) -> Callable[[Tensor], Tensor | PackedWeight]:
        smaller = partial(pack, bits=bits, group=self.group)
        return PackWhereFaster(smaller, self.decoder.mode(1, many_rows=False)) if measure else smaller

    @property
    def num_bytes(self) -> int:
        """Memory the copies take."""
        weights = [weight for layer in self.stack.layers for weight, _ in layer.products()]
        packed = sum(weight.num_bytes for weight in weights if isinstance(weight, PackedWeight))
        return packed + self.head.num_bytes

    @property
    def remarks(self) -> list[str]:
        """Say which weights are not packed."""
        if not self.kept:
            return []
        shapes = ", ".join(f"{width}×{size}" for width, size in self.kept)
        return [f"the {self.name} draft keeps weights of {shapes} as they are: packed products are not faster here"]

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Draft k tokens; their keys and values are the draft's own until verification writes the exact ones."""
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        token = last
        while len(tokens) < k and not (tokens and enough()):
            token, q = choose(self._logits(token, cache, len(tokens)), len(tokens))
            tokens.append(token)
            if q is not None:
                probabilities.append(q)
        return Draft(torch.stack(tokens, 1), torch.stack(probabilities, 1) if probabilities else None, None, 0)

    def _logits(self, token: Tensor, cache: SharedKVCache, offset: int) -> Tensor:
        """Return fp32 logits [B, V] after `token` [B] at position committed + offset."""
        decoder = self.decoder
        step = decoder.step(cache.committed[:, None] + offset, 1, cache, 0, len(self.stack.layers))
        hidden = decoder.embed(token[:, None])
        hidden = self.stack.run(hidden, step, 0, len(self.stack.layers))
        return self.head(hidden, decoder.final_norm)[:, 0]


def estimate_bytes(
    decoder: LayeredDecoder,
    bits: int,
    head_bits: int,
    exit_layer: int | None,
    head_rows: int | None = None,
    group: int = GROUP,
) -> int:
    """Return how many bytes the copies of a draft take."""
    layers = range(exit_layer or decoder.num_layers)
    found = sum(packed_bytes(weight.shape, bits, group) for layer in layers for weight, _ in decoder.products(layer))
    rows, size = decoder.head[0].shape
    if head_bits != 16:
        return found + packed_bytes((head_rows or rows, size), head_bits, group)
    return found + (0 if head_rows is None else head_rows * size * decoder.head[0].element_size())


def check_memory(needed: int, device: torch.device) -> None:
    """Raise a UserError unless `needed` bytes of the device's memory are free."""
    import psutil

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            "a low-precision draft does not fit the memory",
            got=f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free",
            command="--draft-bits 4, fewer layers with --exit-layer, or --drafter copy",
        )
