"""The self-test behind exact numerics: it must see what would change bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from selfspec_kernels import cpu
from tiny import tiny_model

from selfspec_tune.errors import UserError
from selfspec_tune.model import rows
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import ANY_ROWS, RowCounts, certify, certify_at_length, tried_counts


def test_padding_goes_up_to_the_next_certified_count():
    counts = RowCounts((2, 4, 8))
    assert [counts.padded(n) for n in (1, 2, 3, 5, 8)] == [2, 2, 4, 8, 8]
    assert ANY_ROWS.padded(5) == 5
    with pytest.raises(UserError, match="more rows"):
        counts.padded(9)


def test_counts_tried():
    assert tried_counts(9) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]
    assert tried_counts(4) == [1, 2, 3, 4, 8]


@pytest.mark.usefixtures("both_ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_certified_counts_hold_at_every_alignment(dtype):
    decoder = LayeredDecoder(tiny_model().to(dtype))
    classes = certify(decoder, batch_size=1, max_rows=9)
    assert classes and decoder.rows == ANY_ROWS
    at_length = certify_at_length(decoder, batch_size=1, max_rows=9, live_length=300)
    assert set(at_length[0].counts) <= set(range(1, 17)) and at_length[0].counts[-1] >= 9


def test_a_product_that_depends_on_the_number_of_rows_is_seen(monkeypatch, reference_ops):
    decoder = LayeredDecoder(tiny_model())
    genuine = F.linear

    def linear(inputs, weight, bias=None):
        out = genuine(inputs, weight, bias)
        rows_in_call = inputs.numel() // inputs.shape[-1]
        return out * (1 + 1e-6) if rows_in_call == 3 else out

    with torch.inference_mode():
        before = certify(decoder, batch_size=1, max_rows=4)
        monkeypatch.setattr(F, "linear", linear)
        after = certify(decoder, batch_size=1, max_rows=4)
    assert all(3 not in c.counts or c.counts == (3,) for c in after)
    assert {n for c in before for n in c.counts} - {3} == {n for c in after for n in c.counts} - {3}


def test_a_product_that_depends_on_the_row_index_is_seen(monkeypatch, reference_ops):
    decoder = LayeredDecoder(tiny_model())
    genuine = F.linear

    def linear(inputs, weight, bias=None):
        out = genuine(inputs, weight, bias)
        if out.shape[-2] > 2:
            out[..., 2, :] *= 1 + 1e-6
        return out

    monkeypatch.setattr(F, "linear", linear)
    with torch.inference_mode():
        assert certify(decoder, batch_size=1, max_rows=4) == []


def test_differences_that_bf16_rounding_hides_in_the_layers_output_are_seen(monkeypatch, reference_ops):
    """Attention that depends on its rows only in fp32's last bits: rounded to bf16 it rarely shows, but it does."""
    decoder = LayeredDecoder(tiny_model().to(torch.bfloat16))
    from selfspec_tune.model import attention

    genuine = attention.block_attention

    def block_attention(query, *rest):
        out = genuine(query, *rest)
        return out * (1 + 2e-7) if query.shape[1] == 1 else out

    monkeypatch.setattr(attention, "block_attention", block_attention)
    with torch.inference_mode():
        assert all(1 not in c.counts for c in certify(decoder, batch_size=1, max_rows=4))


def test_a_compiled_product_that_depends_on_the_number_of_rows_is_seen(monkeypatch):
    decoder = LayeredDecoder(tiny_model())
    genuine = cpu.few_row_linear

    def few_row_linear(inputs, *rest):
        out = genuine(inputs, *rest)
        return out * (1 + 1e-6) if inputs.numel() // inputs.shape[-1] == 3 else out

    monkeypatch.setattr(cpu, "few_row_linear", few_row_linear)
    with torch.inference_mode():
        assert all(3 not in c.counts or c.counts == (3,) for c in certify(decoder, batch_size=1, max_rows=4))


def test_compiled_ops_give_every_row_count_the_same_bits():
    """What makes exact numerics free on CPUs: no call is padded."""
    for dtype in (torch.float32, torch.bfloat16):
        decoder = LayeredDecoder(tiny_model().to(dtype))
        for batch_size in (1, 3):
            with torch.inference_mode():
                [counts] = certify(decoder, batch_size=batch_size, max_rows=9)
            assert counts.counts == tuple(range(1, 10))


def test_attention_over_the_live_span_is_not_certified(reference_ops):
    """SDPA over the live span gives a row other bits when the span grows; the probe must notice somewhere."""
    decoder = LayeredDecoder(tiny_model())
    decoder.exact = False
    with torch.inference_mode():
        fixed = certify_at_length(_exact(), batch_size=1, max_rows=9, live_length=700)
        span = certify_at_length(decoder, batch_size=1, max_rows=9, live_length=700)
    assert fixed and fixed != span


def _exact() -> LayeredDecoder:
    return LayeredDecoder(tiny_model())


def test_repeat_last():
    tensor = torch.arange(6).view(1, 3, 2)
    assert rows.repeat_last(tensor, 3) is tensor
    assert rows.repeat_last(tensor, 5)[0, :, 0].tolist() == [0, 2, 4, 4, 4]
