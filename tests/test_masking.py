"""Rows with nothing to attend to, what nobody may see, windows and alignments."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa

from .helpers import (
    BACKENDS,
    FEW_BACKENDS,
    Arrays,
    Found,
    agree,
    call,
    check,
    compiled,
    normal,
    output_of,
    qkv,
    want,
)

pytestmark = pytest.mark.numbers

BOTTOM_RIGHT = eqxa.Alignment.BOTTOM_RIGHT
Slices = tuple[Any, ...]


def masked(*false: Slices, shape: tuple[int, ...] = (2, 1, 6, 9)) -> np.ndarray:
    mask = np.ones(shape, bool)
    for at in false:
        mask[at] = False
    return mask


def all_zero(x: np.ndarray) -> None:
    np.testing.assert_array_equal(x, np.zeros_like(x))


def all_gradients_finite(found: Found) -> None:
    for name, gradient in found.gradients.items():
        assert np.isfinite(gradient).all(), name


# Arrays, options, and the rows `batch, query` that see nothing.
EMPTY: dict[str, tuple[Arrays, dict[str, Any], Slices]] = {
    "mask": ({"mask": masked(np.s_[0, :, 2])}, {}, np.s_[0, 2]),
    "mask and causal": (
        {"mask": masked(np.s_[:, :, 1, :2])},
        {"causal": True},
        np.s_[:, 1],
    ),
    "mask of all": ({"mask": np.zeros((1, 1), bool)}, {}, np.s_[:]),
    "bias": (
        {"bias": np.where(masked(np.s_[1, :, 3:]), 0, -np.inf).astype(np.float32)},
        {},
        np.s_[1, 3:],
    ),
    "segments": (
        {
            "q_segment_ids": np.array([[0, 0, 1, 1, -1, -1], [0, 0, 5, 5, 1, -1]]),
            "kv_segment_ids": np.array([[0, 0, 1, 1, 1, -1, -1, -1, -1]] * 2),
        },
        {},
        np.s_[:, 5],
    ),
    "window behind the keys": (
        {"query_offset": np.array([100, 0])},
        {"sliding_window": (3, 3)},
        np.s_[0],
    ),
    "causal before the keys": (
        {"query_offset": np.array([0, -4])},
        {"causal": True},
        np.s_[1, :4],
    ),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_nothing_to_attend_to(backend: str, case: str) -> None:
    extra, options, rows = EMPTY[case]
    found = check(BACKENDS[backend], qkv() | extra, **options)
    all_zero(found.output[rows])
    all_zero(found.gradients["query"][rows])
    assert np.isneginf(np.moveaxis(found.lse, 1, 2)[rows]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_attend_to_but_sinks(backend: str) -> None:
    sinks = normal(3, 4, 2)
    arrays = qkv() | {"softmax_aux": sinks, "mask": masked(np.s_[0, :, 2:])}
    found = check(BACKENDS[backend], arrays)
    all_zero(found.output[0, 2:])
    all_zero(found.gradients["query"][0, 2:])
    own = np.log(np.exp(sinks).sum(-1))
    np.testing.assert_allclose(found.lse[0, :, 2:], np.stack([own] * 4, -1), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_keys(backend: str) -> None:
    arrays = qkv(q_len=7, kv_len=3)
    found = check(BACKENDS[backend], arrays, causal=True, alignment=BOTTOM_RIGHT)
    all_zero(found.output[:, :4])
    all_zero(found.gradients["query"][:, :4])


# Arrays, options, and the keys `batch, key, head` that no query may see.
UNSEEN: dict[str, tuple[Arrays, dict[str, Any], list[Slices]]] = {
    "mask": (
        {"mask": masked(np.s_[0, :, :, 4], np.s_[1, :, :, 7:])},
        {},
        [np.s_[0, 4], np.s_[1, 7:]],
    ),
    "mask over keys": (
        {"mask": masked(np.s_[..., :5], shape=(9,))},
        {},
        [np.s_[:, :5]],
    ),
    "mask of kv_heads": (
        {"mask": masked(np.s_[0, :, 3], shape=(2, 6, 9))},
        {},
        [np.s_[:, 3, 0]],
    ),
    "segments": (
        {
            "q_segment_ids": np.array([[0, 0, 1, 1, 1, -1]] * 2),
            "kv_segment_ids": np.array(
                [[0, 0, 1, 1, 1, 1, -1, -1, -1], [0] * 6 + [2] * 3]
            ),
        },
        {},
        [np.s_[:, 6:]],
    ),
    "packed": (
        {"cum_seqlens_q": np.array([0, 2, 4]), "cum_seqlens_k": np.array([0, 3, 7])},
        {},
        [np.s_[:, 7:]],
    ),
    "packed, no query": (
        {
            "cum_seqlens_q": np.array([0, 2, 2, 6]),
            "cum_seqlens_k": np.array([0, 2, 5, 9]),
        },
        {},
        [np.s_[:, 2:5]],
    ),
    "causal": ({}, {"causal": True}, [np.s_[:, 6:]]),
    "window": (
        {},
        {"sliding_window": (1, 0), "alignment": BOTTOM_RIGHT},
        [np.s_[:, :2]],
    ),
    "query_offset": (
        {"query_offset": np.array([1, -3])},
        {"causal": True},
        [np.s_[0, 7:], np.s_[1, 3:]],
    ),
    "window and sinks": (
        {"query_offset": np.array(3)},
        {"sliding_window": (1, 0), "num_sink_tokens": 1},
        [np.s_[:, 1]],
    ),
    "everything": ({"mask": np.zeros((6, 9), bool)}, {}, [np.s_[:]]),
}


@pytest.mark.parametrize("case", UNSEEN)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_what_nobody_may_see(backend: str, case: str) -> None:
    extra, options, places = UNSEEN[case]
    arrays = qkv() | {"bias": normal(5, 4, 6, 9)} | extra
    run = compiled(BACKENDS[backend], **options)
    clean = run(arrays)
    for garbage in (np.nan, np.inf):
        for at in places:
            arrays["key"][at] = garbage
            arrays["value"][at] = -garbage
        found = run(arrays)
        agree(found, want(arrays, **options))
        np.testing.assert_array_equal(found.output, clean.output)
        np.testing.assert_array_equal(found.lse, clean.lse)
        for name, gradient in clean.gradients.items():
            np.testing.assert_array_equal(found.gradients[name], gradient, name)
        for at in places:
            all_zero(found.gradients["key"][at])
            all_zero(found.gradients["value"][at])


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_garbage_in_padding_of_all_three(backend: str) -> None:
    """Padding goes through a network like any token, and may come out as NaN."""
    arrays = qkv(kv_len=6) | {"q_segment_ids": np.array([[0, 0, 0, 1, -1, -1]] * 2)}
    for name in ("query", "key", "value"):
        arrays[name][:, 4:] = np.nan
    found = check(BACKENDS[backend], arrays, causal=True)
    all_zero(found.output[:, 4:])
    all_zero(found.gradients["query"][:, 4:])


def shown_weights(backend: str, **options: Any) -> np.ndarray:
    """The weights without scores: one-hot values show them. One head, no batch."""
    arrays = {
        "query": np.zeros((8, 1, 2), np.float32),
        "key": np.ones((8, 1, 2), np.float32),
        "value": np.eye(8, dtype=np.float32)[:, None],
    }
    return output_of(BACKENDS[backend], arrays, **options)[:, 0]


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("left", (0, 1, 3, 7))
def test_window_counts_keys(backend: str, left: int) -> None:
    weights = shown_weights(backend, sliding_window=(left, 0))
    for i, row in enumerate(weights):
        first = max(0, i - left)
        np.testing.assert_array_equal(row[:first], 0)
        np.testing.assert_array_equal(row[i + 1 :], 0)
        np.testing.assert_allclose(row[first : i + 1], 1 / (i + 1 - first), rtol=1e-6)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_window_on_both_sides(backend: str) -> None:
    for window in (2, (2, 2)):
        weights = shown_weights(backend, sliding_window=window)
        distance = np.arange(8) - np.arange(8)[:, None]
        np.testing.assert_array_equal(weights > 0, np.abs(distance) <= 2)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_window_as_long_as_the_sequence_is_causal(backend: str) -> None:
    arrays, attend = qkv(kv_len=6), BACKENDS[backend]
    causal = output_of(attend, arrays, causal=True)
    wide = output_of(attend, arrays, sliding_window=(5, 0))
    narrow = output_of(attend, arrays, sliding_window=(4, 0))
    np.testing.assert_allclose(wide, causal, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(narrow[:, :5], causal[:, :5], rtol=1e-6, atol=1e-6)
    assert np.abs(narrow[:, 5] - causal[:, 5]).max() > 1e-3


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_sink_tokens_are_exempt_from_the_left_of_the_window_alone(backend: str) -> None:
    weights = shown_weights(backend, sliding_window=(1, 0), num_sink_tokens=2)
    i, j = np.arange(8)[:, None], np.arange(8)
    expected = (j <= i) & ((j >= i - 1) | (j < 2))
    np.testing.assert_array_equal(weights > 0, expected)
    weights = shown_weights(
        backend, sliding_window=(None, 0), num_sink_tokens=2, query_offset=-3
    )
    np.testing.assert_array_equal(weights > 0, j <= i - 3)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_a_single_query_against_a_cache(backend: str) -> None:
    arrays, attend = qkv(q_len=1, kv_len=9), BACKENDS[backend]
    free = output_of(attend, arrays)
    last = output_of(attend, arrays, causal=True, alignment=BOTTOM_RIGHT)
    first = output_of(attend, arrays, causal=True)
    np.testing.assert_allclose(last, free, rtol=1e-6, atol=1e-6)
    expected = np.repeat(arrays["value"][:, :1], 2, axis=2)
    np.testing.assert_allclose(first, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16), ids=("f16", "bf16"))
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_the_least_finite_bias_is_no_mask(backend: str, dtype: Any) -> None:
    """A row of it is a row of equals: they lie far below any score."""
    arrays = {n: jnp.asarray(x, dtype) for n, x in qkv(q_heads=2).items()}
    bias = jnp.zeros((6, 9), dtype).at[0].set(jnp.finfo(dtype).min)
    found = call(BACKENDS[backend], arrays | {"bias": bias}, causal=False)
    assert np.isfinite(found.output.astype(np.float32)).all()
    assert np.isfinite(found.lse).all()
    all_gradients_finite(found)
    if dtype == jnp.bfloat16:
        mean = np.asarray(arrays["value"], np.float32).mean(1)
        np.testing.assert_allclose(
            found.output[:, 0].astype(np.float32), mean, atol=2e-2
        )


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_no_finite_number_stands_for_minus_infinity(backend: str) -> None:
    """The only key seen is the output, however low its score."""
    arrays = {
        "query": np.array([-2e4, -6e4, -1e30], np.float32).reshape(3, 1, 1),
        "key": np.array([1, 0], np.float32).reshape(2, 1, 1),
        "value": np.array([1, 100], np.float32).reshape(2, 1, 1),
        "mask": np.array([True, False]),
    }
    output = output_of(BACKENDS[backend], arrays, softmax_scale=1.0)
    np.testing.assert_array_equal(output, np.ones((3, 1, 1), np.float32))


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_a_cap_is_below_the_mask(backend: str) -> None:
    arrays = qkv() | {"mask": masked(np.s_[..., 4], shape=(9,))}
    before = output_of(BACKENDS[backend], arrays, logits_soft_cap=1.0)
    arrays["key"][:, 4] = arrays["value"][:, 4] = 1e6
    after = output_of(BACKENDS[backend], arrays, logits_soft_cap=1.0)
    np.testing.assert_array_equal(before, after)


def test_weights() -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    mask = jnp.asarray(masked(np.s_[0, :, 2], np.s_[..., 4]))
    output, weights = eqxa.standard_attention(**arrays, mask=mask, return_weights=True)
    assert weights.shape == (2, 4, 6, 9)
    allowed = np.broadcast_to(np.asarray(mask), weights.shape)
    all_zero(np.asarray(weights)[~allowed])
    sums = np.asarray(weights).sum(-1)
    np.testing.assert_allclose(sums, allowed.any(-1).astype(np.float32), rtol=1e-5)
    value = np.repeat(np.asarray(arrays["value"]), 2, axis=2)
    expected = np.einsum("bhts,bshv->bthv", weights, value)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
