"""A search through options and shapes together, against the reference."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqx_attention as eqxa

from .helpers import Arrays, check, flash, normal, qkv

pytestmark = pytest.mark.numbers

Draw = st.DrawFn


@st.composite
def problems(draw: Draw) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and static options of one call."""
    seed = draw(st.integers(0, 3))
    batch = draw(st.sampled_from([(), (2,), (1, 2)]))
    q_len, kv_len = draw(st.sampled_from([(1, 7), (5, 5), (7, 3), (6, 8)]))
    q_heads, kv_heads = draw(st.sampled_from([(2, 1), (4, 2), (3, 3)]))
    arrays = qkv(
        seed,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
    )
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "alignment": draw(st.sampled_from(eqxa.Alignment)),
        "sliding_window": draw(
            st.sampled_from([None, 1, (2, 0), (0, None), (None, 1), (3, 2)])
        ),
        "logits_soft_cap": draw(st.sampled_from([None, 0.9])),
        "num_sink_tokens": draw(st.integers(0, 2)),
    }

    def head_shape() -> tuple[int, ...]:
        heads = draw(st.sampled_from([1, kv_heads, q_heads]))
        rows, columns = (
            draw(st.sampled_from([1, q_len])),
            draw(st.sampled_from([1, kv_len])),
        )
        return (*draw(st.sampled_from([(), batch])), heads, rows, columns)

    if draw(st.booleans()):
        arrays["mask"] = normal(seed + 3, *head_shape()) > -0.4
    if draw(st.booleans()):
        bias = normal(seed + 4, *head_shape())
        arrays["bias"] = np.where(bias > 1.2, -np.inf, bias).astype(np.float32)
    if draw(st.booleans()):
        arrays["softmax_aux"] = normal(
            seed + 5, *draw(st.sampled_from([(1,), (3,), (q_heads, 2)]))
        )
    if draw(st.booleans()):
        sinks = options["num_sink_tokens"]
        arrays["sink_bias"] = normal(
            seed + 6, *draw(st.sampled_from([(sinks,), (q_heads, sinks)]))
        )
    if draw(st.booleans()):
        arrays["softmax_scale"] = np.float32(draw(st.sampled_from([-0.5, 0.0, 0.8])))
    if draw(st.booleans()):
        offset = normal(seed + 7, *draw(st.sampled_from([(), batch])), std=3.0)
        arrays["query_offset"] = offset.astype(np.int32)
    match draw(st.sampled_from(["none", "segments", "packed"])):
        case "segments":
            rng = np.random.default_rng(seed)
            arrays["q_segment_ids"] = rng.integers(-1, 3, (*batch, q_len))
            arrays["kv_segment_ids"] = rng.integers(-1, 3, (*batch, kv_len))
        case "packed":
            rng = np.random.default_rng(seed)
            for name, length in (("q", q_len), ("k", kv_len)):
                inner = np.sort(rng.integers(0, length + 1, 3))
                arrays[f"cum_seqlens_{name}"] = np.concatenate([[0], inner])
        case _:
            pass
    return arrays, options


@given(problem=problems(), chunks=st.sampled_from([(2, 3), (4, 2), (16, 16)]))
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
def test_flash(problem: tuple[Arrays, dict[str, Any]], chunks: tuple[int, int]) -> None:
    arrays, options = problem
    check(flash(*chunks), arrays, **options)


@given(problem=problems())
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
def test_standard(problem: tuple[Arrays, dict[str, Any]]) -> None:
    arrays, options = problem
    check(eqxa.standard_attention, arrays, **options)
