"""`LayeredDecoder` with a GPU's ops under Triton's interpreter. `test_decoder` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import cpu, ops, ragged_attention_kernel, rope_kv_write_kernel
from tiny import VOCAB, tiny_model

from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder

# fp32 logits of size 10 of two layers; attention is summed in another order.
TOLERANCE = 1e-4


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors count as a GPU's; returns the names of the Triton ops called since."""
    called: list[str] = []

    def counted(module, name):
        genuine = getattr(module, name)

        def op(*arguments):
            called.append(name)
            return genuine(*arguments)

        return op

    monkeypatch.setattr(cpu, "enabled", False)
    monkeypatch.setattr(ops, "attention_on_gpu", lambda tensor, head_size: True)
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    for module, name in ((ragged_attention_kernel, "ragged_attention"), (rope_kv_write_kernel, "rope_kv_write")):
        monkeypatch.setattr(module, name, counted(module, name))
    return called


def logits(decoder: LayeredDecoder, tokens: torch.Tensor) -> torch.Tensor:
    """Prefill but the last three tokens, then run those in one call with a padding row, over a poisoned cache."""
    cache: SharedKVCache = decoder.new_cache(capacity=256)
    decoder.prefill(tokens[:, :-3], cache)
    cache.poison()
    positions = cache.committed[:, None] + torch.tensor([[0, 1, 2, 2]])
    hidden = decoder.embed(tokens[:, [-3, -2, -1, -1]])
    step = decoder.step(positions, 3, cache, 0, decoder.num_layers)
    hidden = decoder._stack.run(hidden, step, 0, decoder.num_layers)
    assert cache.keys[:, :, :, len(tokens[0]) :].isnan().all() == (decoder.mode(1, many_rows=False) == "compiled")
    return decoder.logits(hidden)[:, :3]


@torch.inference_mode()
@pytest.mark.parametrize("model_type, changes", [("qwen3", {}), ("mistral", {"sliding_window": 50})])
def test_decoding_runs_the_ops_of_the_gpu(model_type, changes, on_gpu, monkeypatch):
    model = tiny_model(model_type, num_hidden_layers=2, **changes)
    tokens = torch.randint(VOCAB, (1, 130), generator=torch.Generator().manual_seed(1))
    decoder = LayeredDecoder(model)
    assert decoder.mode(1, many_rows=False) == "compiled" and not decoder.layers_compiled
    ours = logits(decoder, tokens)
    assert on_gpu == ["rope_kv_write", "ragged_attention"] * 2
    monkeypatch.setattr(ops, "attention_on_gpu", lambda tensor, head_size: False)
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: False)
    assert decoder.mode(1, many_rows=False) == "reference"
    torch.testing.assert_close(ours, logits(decoder, tokens), rtol=0, atol=TOLERANCE)
    assert len(on_gpu) == 4
