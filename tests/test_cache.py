"""What a cache in a row stores, and which values it and decoding refuse."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa
from eqx_attention import _typing

from . import reference
from .helpers import close, normal

pytestmark = pytest.mark.numbers

BATCH = 3


def empty(capacity: int = 9, **options: Any) -> eqxa.KVCache:
    return eqxa.KVCache.init(BATCH, capacity, 2, 3, **options)


def rows(seed: int, count: int) -> Array:
    return jnp.asarray(normal(seed, BATCH, count, 2, 3))


def integers(*values: int) -> Array:
    return jnp.asarray(values)


def test_padding_is_not_seen() -> None:
    """Neither as rows of the cache nor as queries, not even NaN in a gradient."""
    key, counts = rows(0, 4), integers(4, 2, 0)
    query = jnp.asarray(normal(1, BATCH, 4, 4, 3))
    padding = np.arange(4)[None] >= np.asarray(counts)[:, None]
    query = jnp.where(padding[..., None, None], jnp.nan, query)
    key = jnp.where(padding[..., None, None], jnp.nan, key)
    cache = empty().append(key, -key, counts)

    @jax.value_and_grad
    def total(query: Array) -> Array:
        out, lse = cache.attend(
            query, num_tokens=counts, return_lse=True, softmax_aux=jnp.ones(1)
        )
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    value, slope = total(query)
    assert np.isfinite(value)
    assert not np.asarray(slope)[padding].any()
    assert np.asarray(slope)[~padding].all()
    out, lse = cache.attend(query, num_tokens=counts, return_lse=True)
    for i, count in enumerate((4, 2, 0)):
        expected = reference.decode(
            *(np.asarray(x)[i, :count] for x in (query, key, -key)), 0, count
        )
        close("output", out[i, :count], expected.output)
        close("lse", lse[i, :, :count], expected.lse)
    assert not np.asarray(out)[padding].any()
    one = cache.attend(query[:, 0], num_tokens=integers(1, 0, 0))
    assert np.asarray(one)[0].any()
    assert not np.asarray(one)[1:].any()


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16, jnp.float32))
def test_int8_of_any_rows(dtype: Any) -> None:
    """Rows of all sizes, each off by at most 1/254 of its largest number."""
    sizes = np.array([1e-4, 1.0, 1e3, 0.0])[:, None, None]
    given = jnp.asarray(sizes * normal(0, BATCH, 4, 2, 3), dtype)
    cache = empty(dtype=jnp.int8).append(given, given)
    assert cache.key.dtype == jnp.int8
    assert cache.key_scale is not None
    assert cache.key_scale.dtype == jnp.float32
    found = np.asarray(cache.key)[:, :4] * np.asarray(cache.key_scale)[:, :4, :, None]
    exact = np.asarray(given).astype(np.float64)
    bound = np.abs(exact).max(-1, keepdims=True) / 254
    assert (np.abs(found - exact) <= bound * (1 + 1e-5)).all()


def test_nan_in_int8_is_for_those_who_see_it() -> None:
    key = rows(0, 4).at[:, 2, 0, 0].set(jnp.nan)
    cache = empty(dtype=jnp.int8).append(key, rows(1, 4))
    query = jnp.asarray(normal(2, BATCH, 4, 4, 3))
    out = np.asarray(cache.attend(query))
    assert np.isfinite(out[:, :2]).all()
    assert np.isnan(out[:, 2:, :2]).all()
    assert np.isfinite(out[:, 2:, 2:]).all()


def test_int8_is_read_block_by_block() -> None:
    """Numbers of the whole cache are never made."""
    cache = eqxa.KVCache.init(1, 65536, 2, 8, dtype=jnp.int8)
    query = jnp.ones((1, 4, 8))
    attend = jax.jit(lambda cache, query: cache.attend(query))
    memory = attend.lower(cache, query).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.key.nbytes


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.int16), ids=str)
def test_any_integers(dtype: Any) -> None:
    counts = jnp.asarray(np.array([2, 1, 0], dtype))
    cache = empty().append(rows(0, 2), rows(0, 2), counts)
    assert cache.lengths.dtype == jnp.int32
    np.testing.assert_array_equal(cache.lengths, [2, 1, 0])


def test_overflow_without_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is lost, and nothing else is touched."""
    monkeypatch.setattr(_typing, "DEBUG", False)
    append = jax.jit(eqxa.KVCache.append)
    cache = append(empty(4), rows(0, 3), rows(0, 3), integers(3, 2, -5))
    np.testing.assert_array_equal(cache.lengths, [3, 2, 0])
    cache = append(cache, rows(1, 3), rows(1, 3), integers(3, 2, 99))
    np.testing.assert_array_equal(cache.lengths, [4, 4, 3])
    expected = np.array(
        [
            [*rows(0, 3)[0], rows(1, 3)[0, 0]],
            [*rows(0, 3)[1, :2], *rows(1, 3)[1, :2]],
            [*rows(1, 3)[2], jnp.zeros((2, 3))],
        ]
    )
    np.testing.assert_array_equal(cache.key, expected)


def ragged(start: Array, end: Array) -> Array:
    cache = jnp.ones((BATCH, 9, 2, 3))
    return eqxa.ragged_decode_attention(
        jnp.ones((BATCH, 4, 3)), cache, cache, start, end
    )


def paged(start: Array, end: Array) -> Array:
    pages = jnp.ones((5, 3, 2, 3))
    table = jnp.zeros((BATCH, 3), jnp.int32)
    return eqxa.paged_decode_attention(
        jnp.ones((BATCH, 4, 3)), pages, pages, table, start, end
    )


BOUNDS = {
    "start after end": ((0, 3, 0), (1, 2, 1)),
    "negative start": ((-1, 0, 0), (1, 2, 1)),
    "negative end": ((0, 0, 0), (1, -2, 1)),
    "end past the cache": ((0, 0, 0), (1, 10, 1)),
}


@pytest.mark.parametrize("decode", (ragged, paged))
@pytest.mark.parametrize("case", BOUNDS)
def test_wrong_bounds(
    case: str, decode: Callable[..., Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where they are known, in debugging if traced; else nothing is read."""
    start, end = (integers(*x) for x in BOUNDS[case])
    with pytest.raises(ValueError, match="sequence_end = ") as error:
        decode(start, end)
    assert "capacity is 9" in str(error.value)
    with pytest.raises(Exception, match="0 <= start <= end <= capacity"):
        jax.block_until_ready(eqx.filter_jit(decode)(start, end))
    monkeypatch.setattr(_typing, "DEBUG", False)
    assert np.isfinite(jax.jit(lambda a, b: decode(a, b))(start, end)).all()


WRONG: dict[str, tuple[Callable[[eqxa.KVCache], Any], str]] = {
    "outgrown": (
        lambda c: c.append(rows(0, 9), rows(0, 9)).append(rows(0, 1), rows(0, 1)),
        r"outgrows its capacity of 9 tokens: lengths = \[9 9 9\]",
    ),
    "too many tokens": (
        lambda c: c.append(rows(0, 2), rows(0, 2), integers(0, 3, 0)),
        r"num_tokens must lie between 0 and 2.*num_tokens = \[0 3 0\]",
    ),
    "fewer than none": (
        lambda c: c.append(rows(0, 2), rows(0, 2), integers(0, -1, 0)),
        "num_tokens",
    ),
    "too many queries": (
        lambda c: c.attend(jnp.ones((BATCH, 2, 4, 3)), num_tokens=integers(0, 3, 0)),
        "num_tokens",
    ),
    "width": (lambda c: c.attend(jnp.ones((BATCH, 4, 2))), "width 2"),
    "heads": (lambda c: c.attend(jnp.ones((BATCH, 3, 3))), "heads"),
    "block_size": (
        lambda c: c.attend(jnp.ones((BATCH, 4, 3)), block_size=0),
        "block_size",
    ),
    "capacity": (lambda c: empty(-1), "capacity is -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(empty())


WRONG_TYPES: dict[str, tuple[Callable[[eqxa.KVCache], Any], str]] = {
    "counts of floats": (
        lambda c: c.append(rows(0, 3), rows(0, 3), jnp.ones(BATCH)),
        "num_tokens",
    ),
    "dtype": (lambda c: empty(dtype=jnp.int16), "floating or int8"),
    "size": (lambda c: empty(2.0), "capacity"),
    "unknown option": (
        lambda c: c.attend(jnp.ones((BATCH, 4, 3)), causal=True),
        "causal",
    ),
    "mask of floats": (
        lambda c: c.attend(jnp.ones((BATCH, 4, 3)), mask=jnp.ones(9)),
        "mask",
    ),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_wrong_types(case: str) -> None:
    call, message = WRONG_TYPES[case]
    with pytest.raises(TypeError, match=message):
        call(empty())
