"""What went wrong elsewhere, by public reports, and is right here.

Each case names the report that taught it. Most of them are values and gradients by the
reference; the rest is in the topic's own file.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa

from . import reference
from .helpers import Arrays, check, close, flash, normal, qkv

pytestmark = pytest.mark.numbers

BOTTOM_RIGHT = eqxa.Alignment.BOTTOM_RIGHT
BACKENDS = {"standard": eqxa.standard_attention, "flash": flash(16, 16)}


class Case(NamedTuple):
    """A call. `sizes`: batch, q_len, kv_len, q_heads, kv_heads, qk_dim and v_dim."""

    report: str
    sizes: tuple[int, ...]
    seed: int
    extra: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    std: float = 1.0
    tolerance: float = 3e-5

    def arrays(self) -> Arrays:
        batch, q_len, kv_len, q_heads, kv_heads, qk_dim, v_dim = self.sizes
        found = qkv(
            self.seed,
            batch=(batch,),
            q_len=q_len,
            kv_len=kv_len,
            q_heads=q_heads,
            kv_heads=kv_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
        )
        return {n: np.float32(self.std) * x for n, x in found.items()} | self.extra


def chance(seed: int, probability: float, *shape: int, at: Any, value: bool) -> Any:
    """A random mask in which one place is set."""
    mask = np.random.default_rng(seed).random(shape) < probability
    mask[at] = value
    return mask


def infinite(x: Any, *places: Any) -> Any:
    for at in places:
        x[at] = -np.inf
    return x


BAND = np.abs(np.arange(40)[:, None] - np.arange(40)) <= 5 + np.arange(40)[:, None] // 8
DOCUMENTS = np.repeat([[0, 1, 2]], (7, 9, 4), axis=1)

CASES = {
    "mask and causal leave a row": Case(
        "patrick-kidger/equinox#274",
        (1, 4, 4, 2, 1, 8, 8),
        14,
        {"mask": ~np.pad(np.ones((1, 2), bool), ((1, 2), (0, 2)))},
        {"causal": True},
    ),
    "bias of -inf": Case(
        "huggingface/transformers#17306",
        (1, 4, 5, 2, 1, 4, 4),
        46,
        {"bias": infinite(normal(49, 1, 2, 4, 5), np.s_[0, 0, 1], np.s_[0, 1, 2, 1:4])},
    ),
    "scores far below any fill": Case(
        "flashinfer-ai/flashinfer#4401",
        (1, 1, 40, 1, 1, 4, 2),
        48,
        {
            "query": np.full((1, 1, 1, 4), -4e5, np.float32),
            "key": np.full((1, 40, 1, 4), 5e5, np.float32),
        },
        {"softmax_scale": 1.0, "sliding_window": (None, 20), "query_offset": 0},
        # The gradients of key and scale are differences of numbers of 1e11.
        tolerance=1e-2,
    ),
    "cap far below the scores": Case(
        "onnx/onnx#7865",
        (1, 5, 5, 2, 1, 4, 4),
        140,
        {"mask": chance(5, 0.6, 1, 1, 5, 5, at=np.s_[..., 4], value=False)},
        {"logits_soft_cap": 1.0},
        std=3.0,
    ),
    "cap and causal": Case(
        "vllm-project/vllm-metal#665",
        (1, 6, 6, 2, 2, 4, 4),
        144,
        {},
        {"logits_soft_cap": 2.0, "causal": True},
        std=6.0,
    ),
    "head h reads h // group": Case(
        "onnx/onnx#7274",
        (2, 5, 7, 6, 2, 4, 4),
        163,
        {"mask": chance(3, 0.7, 1, 6, 1, 7, at=np.s_[..., 0], value=True)},
        {"causal": True},
    ),
    "bias after the scale": Case(
        "jax-ml/jax#27184",
        (2, 3, 5, 2, 1, 4, 4),
        190,
        {"bias": normal(195, 2, 2, 3, 5, std=2.0)},
        {"softmax_scale": 0.25},
    ),
    "bias across chunks": Case(
        "facebookresearch/xformers#783",
        (1, 20, 20, 2, 2, 4, 4),
        196,
        {"bias": normal(199, 1, 2, 20, 20)},
        {"causal": True},
    ),
    "mask that changes within a chunk": Case(
        "google-research/tabfm#40", (1, 40, 40, 2, 1, 4, 4), 210, {"mask": BAND}
    ),
    "mask of keys alone": Case(
        "jax-ml/jax#28974",
        (3, 4, 6, 2, 2, 4, 4),
        214,
        {"mask": chance(8, 0.5, 3, 1, 1, 6, at=np.s_[..., 2], value=True)},
    ),
    "mask of heads, not of the batch": Case(
        "jax-ml/jax#23349",
        (4, 4, 4, 4, 4, 4, 4),
        218,
        {"mask": chance(9, 0.5, 1, 4, 4, 4, at=np.s_[..., 1], value=True)},
    ),
    "mask of the batch, not of heads": Case(
        "jax-ml/jax#23349",
        (4, 4, 4, 4, 4, 4, 4),
        218,
        {"mask": chance(9, 0.5, 4, 1, 4, 4, at=np.s_[..., 1], value=True)},
    ),
    "one less, one more than a chunk": Case(
        "openxla/tokamax#316", (1, 15, 17, 2, 1, 4, 4), 232, {}, {"causal": True}
    ),
    "two chunks and one, less one": Case(
        "pytorch/pytorch#153799",
        (1, 33, 31, 2, 1, 4, 4),
        234,
        {},
        {"sliding_window": (6, 2)},
    ),
    "three chunks and one": Case(
        "pytorch/xla#8671", (1, 49, 48, 2, 1, 4, 4), 237, {}, {"causal": True}
    ),
    "documents": Case(
        "huggingface/nanoVLM#204",
        (1, 20, 20, 2, 1, 4, 4),
        260,
        {"q_segment_ids": DOCUMENTS, "kv_segment_ids": DOCUMENTS},
        {"causal": True},
    ),
    "other ids on either side": Case(
        "AI-Hypercomputer/maxtext#4929",
        (2, 5, 8, 2, 2, 4, 4),
        264,
        {
            "q_segment_ids": np.array([[1, 1, 2, 3, 9]] * 2),
            "kv_segment_ids": np.array([[1, 1, 1, 2, 2, 2, 5, 5]] * 2),
        },
    ),
    "sinks are not capped or scaled": Case(
        "modular/modular#6198",
        (2, 5, 6, 4, 2, 4, 4),
        273,
        {"softmax_aux": normal(278, 4, 2, std=3.0)},
        {
            "softmax_scale": 0.3,
            "logits_soft_cap": 1.0,
            "causal": True,
            "sliding_window": (1, 0),
        },
        std=2.0,
    ),
    "scores of 1e4": Case(
        "tinygrad/tinygrad#4985",
        (1, 4, 6, 2, 1, 4, 4),
        314,
        {},
        {"softmax_scale": 1.0},
        std=70.0,
        tolerance=5e-3,
    ),
    "widths of no power of two": Case(
        "Dao-AILab/flash-attention#753",
        (1, 5, 6, 2, 1, 72, 24),
        402,
        {},
        {"causal": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cases(backend: str, name: str) -> None:
    case = CASES[name]
    options = case.options
    check(BACKENDS[backend], case.arrays(), tolerance=case.tolerance, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_of_none_and_one(backend: str) -> None:
    """Dao-AILab/flash-attention#1537: the longest query may be one token long."""
    arrays = qkv(250, batch=(), q_len=2, kv_len=8, q_heads=6, kv_heads=3, qk_dim=4)
    arrays["cum_seqlens_q"] = np.array([0, 0, 1, 1, 2])
    arrays["cum_seqlens_k"] = np.array([0, 0, 3, 3, 8])
    check(BACKENDS[backend], arrays, causal=True, softmax_scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_repeat_and_do_not_tile(backend: str) -> None:
    """apple/axlearn#842: values that name their head."""
    query, key = jnp.asarray(normal(160, 2, 6, 4)), jnp.asarray(normal(161, 3, 3, 4))
    value = jnp.broadcast_to(jnp.asarray([10.0, 20.0, 30.0])[:, None], (3, 3, 1))
    output = BACKENDS[backend](query, key, value)
    expected = np.broadcast_to([10, 10, 20, 20, 30, 30], (2, 6))
    np.testing.assert_allclose(output[..., 0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", (np.int32, np.int8), ids=str)
def test_a_mask_of_zeros_and_ones_is_never_added(dtype: Any) -> None:
    """Comfy-Org/ComfyUI#13471: it is what it is as booleans."""
    arrays = {n: jnp.asarray(x) for n, x in qkv(400, q_len=3, kv_len=4).items()}
    mask = np.array([[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
    for attend in BACKENDS.values():
        found = attend(**arrays, mask=jnp.asarray(mask.astype(dtype)))
        expected = attend(**arrays, mask=jnp.asarray(mask == 1))
        np.testing.assert_array_equal(found, expected)


def test_merging_parts_with_scores_of_1e3() -> None:
    """flashinfer-ai/flashinfer#4051, NVIDIA/TransformerEngine#716."""
    query, key = normal(300, 1, 3, 2, 4, std=30.0), normal(301, 1, 9, 2, 4, std=30.0)
    value = normal(302, 1, 9, 2, 4)
    mask = np.ones((1, 1, 3, 9), bool)
    mask[0, 0, 1, :6] = mask[0, 0, 2] = False
    parts = [
        eqxa.standard_attention(
            jnp.asarray(query),
            jnp.asarray(key[:, i : i + 3]),
            jnp.asarray(value[:, i : i + 3]),
            mask=jnp.asarray(mask[..., i : i + 3]),
            softmax_scale=1.0,
            return_lse=True,
        )
        for i in (0, 3, 6)
    ]
    output, lse = eqxa.merge_attention([p[0] for p in parts], [p[1] for p in parts])
    whole = reference.attention(query, key, value, mask=mask, softmax_scale=1.0)
    close("output", output, whole.output, 1e-3)
    close("lse", lse, whole.lse, 1e-5)


@pytest.mark.parametrize("block_size", (None, 16))
def test_decode_ranges(block_size: int | None) -> None:
    """jax-ml/jax#24602, AI-Hypercomputer/maxtext#3946: where ranges begin and end."""
    query, key, value = qkv(
        410, batch=(5,), q_len=1, kv_len=40, qk_dim=4, v_dim=4
    ).values()
    start, end = np.array([0, 7, 20, 0, 39]), np.array([40, 33, 20, 0, 40])
    window = np.array([16, 15, 0, 31, 33]), np.array([32, 17, 1, 33, 40])
    attend = jax.jit(
        lambda start, end: eqxa.ragged_decode_attention(
            jnp.asarray(query),
            jnp.asarray(key),
            jnp.asarray(value),
            start,
            end,
            block_size=block_size,
            return_lse=True,
        )
    )
    for begin, stop in ((start, end), window):
        output, lse = attend(jnp.asarray(begin), jnp.asarray(stop))
        expected = reference.decode(query, key, value, begin, stop)
        close("output", output, expected.output)
        close("lse", lse, expected.lse)
        np.testing.assert_array_equal(np.asarray(output)[begin == stop], 0)
