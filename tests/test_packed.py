"""Packed sequences: each is as if it were alone."""

from typing import Any

import numpy as np
import pytest

import eqx_attention as eqxa

from .helpers import (
    BACKENDS,
    FEW_BACKENDS,
    Arrays,
    agree,
    check,
    close,
    compiled,
    cotangents,
    flash,
    normal,
    output_of,
    qkv,
    want,
)
from .reference import attention, gradients

pytestmark = pytest.mark.numbers

TOP_LEFT, BOTTOM_RIGHT = eqxa.Alignment.TOP_LEFT, eqxa.Alignment.BOTTOM_RIGHT
CUM_Q = np.array([0, 3, 3, 4, 9])
CUM_K = np.array([0, 2, 5, 9, 11])
Q_LEN, KV_LEN = 11, 14
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal from bottom right": {"causal": True, "alignment": BOTTOM_RIGHT},
    "window and sinks": {"sliding_window": (0, 0), "num_sink_tokens": 1},
    "offset": {"causal": True, "query_offset": 1},
}


def packed(**arrays: Any) -> Arrays:
    found = qkv(batch=(), q_len=Q_LEN, kv_len=KV_LEN)
    return found | {"cum_seqlens_q": CUM_Q, "cum_seqlens_k": CUM_K} | arrays


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_each_sequence_alone(backend: str, name: str) -> None:
    options = OPTIONS[name]
    arrays = packed()
    found = check(BACKENDS[backend], arrays, **options)
    d_output, d_lse = cotangents(arrays)
    alone = options | {"alignment": options.get("alignment", TOP_LEFT).value}
    for a, b, c, d in zip(CUM_Q[:-1], CUM_Q[1:], CUM_K[:-1], CUM_K[1:], strict=True):
        one = arrays["query"][a:b], arrays["key"][c:d], arrays["value"][c:d]
        expected = attention(*one, **alone)
        np.testing.assert_allclose(found.output[a:b], expected.output, 1e-4, 1e-5)
        np.testing.assert_allclose(found.lse[:, a:b], expected.lse, 1e-4, 1e-5)
        slopes = gradients(*one, d_output[a:b], d_lse[:, a:b], **alone)
        for which, part in (
            ("query", np.s_[a:b]),
            ("key", np.s_[c:d]),
            ("value", np.s_[c:d]),
        ):
            got = found.gradients[which][part]
            np.testing.assert_allclose(got, slopes[which], 1e-4, 3e-5, err_msg=which)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_padding_after_the_last_sequence(backend: str) -> None:
    arrays = packed()
    for name, end in (("query", 9), ("key", 11), ("value", 11)):
        arrays[name][end:] = np.nan
    found = check(BACKENDS[backend], arrays)
    np.testing.assert_array_equal(found.output[9:], 0)
    assert np.isneginf(found.lse[:, 9:]).all()
    for name, end in (("query", 9), ("key", 11), ("value", 11)):
        np.testing.assert_array_equal(found.gradients[name][end:], 0)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_in_a_batch_with_everything(backend: str) -> None:
    """The offsets are those of all batch elements; positions count per sequence."""
    arrays = qkv(q_len=Q_LEN, kv_len=KV_LEN) | {
        "cum_seqlens_q": CUM_Q,
        "cum_seqlens_k": CUM_K,
        "bias": normal(3, 4, Q_LEN, KV_LEN),
        "softmax_aux": normal(4, 2),
        "sink_bias": normal(5, 4, 2),
        "mask": normal(6, 2, 1, Q_LEN, KV_LEN) > -1,
    }
    check(
        BACKENDS[backend],
        arrays,
        causal=True,
        alignment=BOTTOM_RIGHT,
        sliding_window=(1, None),
        num_sink_tokens=2,
        logits_soft_cap=1.0,
    )


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_one_given_alone_serves_both(backend: str) -> None:
    arrays, attend = qkv(kv_len=6), BACKENDS[backend]
    ids = np.array([[0, 0, 0, 1, 1, -1], [0, 1, 1, 2, 2, 2]])
    for names, value in (
        (("q_segment_ids", "kv_segment_ids"), ids),
        (("cum_seqlens_q", "cum_seqlens_k"), np.array([0, 2, 5])),
    ):
        both = output_of(attend, arrays | {name: value for name in names})
        for name in names:
            one = output_of(attend, arrays | {name: value})
            close("output", one, both)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_degenerate_offsets(backend: str) -> None:
    run = compiled(BACKENDS[backend], causal=True)
    for cum_seqlens in ([0, 0, 0], [0, 0, 6], [0, 6, 6], [0, 1, 2], [0]):
        arrays = qkv(batch=(), kv_len=6) | {"cum_seqlens_q": np.array(cum_seqlens)}
        expected = want(arrays | {"cum_seqlens_k": np.array(cum_seqlens)}, causal=True)
        agree(run(arrays), expected)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_segments_do_not_leak(backend: str) -> None:
    """Another segment's keys and values change nothing, bit for bit."""
    arrays = qkv(kv_len=6) | {"q_segment_ids": np.array([[0, 0, 1, 1, 2, 2]] * 2)}
    before = output_of(BACKENDS[backend], arrays)
    arrays["key"][:, 2:4] *= 50
    arrays["value"][:, 2:4] *= 50
    after = output_of(BACKENDS[backend], arrays)
    for rows in (slice(0, 2), slice(4, 6)):
        np.testing.assert_array_equal(before[:, rows], after[:, rows])
    assert np.abs(before[:, 2:4] - after[:, 2:4]).max() > 1


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_segments_in_any_order(backend: str) -> None:
    """Ids may repeat, and need not rise."""
    arrays = qkv() | {
        "q_segment_ids": np.array([[5, 0, 5, -3, 0, 9], [1, 1, 1, 0, 0, 0]]),
        "kv_segment_ids": np.array([[0, 5, 5, 0, -3, 7, 0, 5, -1], [0, 1] * 4 + [0]]),
    }
    check(BACKENDS[backend], arrays)


@pytest.mark.parametrize("dtype", (np.int8, np.int16), ids=str)
def test_any_integers(dtype: Any) -> None:
    arrays = qkv(batch=(), kv_len=6)
    for name in ("q_segment_ids", "cum_seqlens_q"):
        value = np.array([0, 0, 1, 1, 2, 6])
        narrow = output_of(flash(4, 4), arrays | {name: value.astype(dtype)})
        np.testing.assert_array_equal(
            narrow, output_of(flash(4, 4), arrays | {name: value})
        )
