"""Caches hold what a dictionary of arrays would, and attend as a plain cache does."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers

BATCH, HEADS, QK, V = 3, 2, 4, 3
AnyCache = eqxa.KVCache | eqxa.RollingKVCache | eqxa.PagedKVCache


def plain(**options: Any) -> eqxa.KVCache:
    return eqxa.KVCache.init(BATCH, 40, HEADS, QK, V, **options)


def paged(num_pages: int = 24, **options: Any) -> eqxa.PagedKVCache:
    return eqxa.PagedKVCache.init(num_pages, 4, BATCH, 10, HEADS, QK, V, **options)


def rolling(**options: Any) -> eqxa.RollingKVCache:
    return eqxa.RollingKVCache.init(BATCH, 5, HEADS, QK, V, max_rows=3, **options)


def rows(seed: int, count: int) -> tuple[Array, Array, Array]:
    return (
        jnp.asarray(normal(seed, BATCH, count, 2 * HEADS, QK)),
        jnp.asarray(normal(seed + 1, BATCH, count, HEADS, QK)),
        jnp.asarray(normal(seed + 2, BATCH, count, HEADS, V)),
    )


@eqx.filter_jit
def step(
    cache: AnyCache, query: Array, key: Array, value: Array, num_tokens: Array
) -> tuple[AnyCache, Array, Array]:
    cache = cache.append(key, value, num_tokens)
    out, lse = cache.attend(query, num_tokens=num_tokens, return_lse=True)
    return cache, out, lse


@eqx.filter_jit
def step_in_window(
    cache: eqxa.KVCache,
    query: Array,
    key: Array,
    value: Array,
    num_tokens: Array,
    sinks: int,
) -> tuple[eqxa.KVCache, Array, Array]:
    cache = cache.append(key, value, num_tokens)
    out, lse = cache.attend(
        query,
        num_tokens=num_tokens,
        return_lse=True,
        sliding_window=(5, 0),
        num_sink_tokens=sinks,
    )
    return cache, out, lse


def test_attends_as_ragged_decoding() -> None:
    cache = plain()
    _, key, value = rows(0, 6)
    cache = cache.append(key, value, jnp.array([6, 0, 2]))
    query, key, value = rows(3, 2)
    cache = cache.append(key, value)
    expected = eqxa.ragged_decode_attention(
        query, cache.key, cache.value, 0 * cache.lengths, cache.lengths
    )
    close("output", cache.attend(query), expected)
    close("one token", cache.attend(query[:, 1]), expected[:, 1])


@pytest.mark.parametrize("make", (plain, paged), ids=("plain", "paged"))
@pytest.mark.parametrize("chunk", (1, 3, 12))
def test_prefill_in_chunks(make: Any, chunk: int) -> None:
    query, key, value = rows(0, 12)
    lengths = np.array([12, 7, 0])
    whole, expected, _ = step(make(), query, key, value, jnp.asarray(lengths))
    cache, outs = make(), []
    for start in range(0, 12, chunk):
        part = slice(start, start + chunk)
        count = jnp.asarray(np.clip(lengths - start, 0, chunk))
        cache, out, lse = step(
            cache, query[:, part], key[:, part], value[:, part], count
        )
        padding = np.arange(chunk)[None] >= np.asarray(count)[:, None]
        assert not np.asarray(out)[padding].any()
        assert (np.asarray(lse).transpose(0, 2, 1)[padding] == -np.inf).all()
        outs.append(np.asarray(out))
    close("outputs", np.concatenate(outs, axis=1), expected)
    for name in ("key", "value"):
        for i, length in enumerate(lengths):
            found, right = contents(cache, name)[i], contents(whole, name)[i]
            np.testing.assert_array_equal(found[:length], right[:length])


def contents(cache: AnyCache, name: str) -> np.ndarray:
    """All slots of each sequence, in a row, as float32."""
    if not isinstance(cache, eqxa.PagedKVCache):
        return numbers(getattr(cache, name), getattr(cache, f"{name}_scale"))
    pages = numbers(getattr(cache, f"{name}_pages"), getattr(cache, f"{name}_scale"))
    table = np.asarray(cache.page_table)
    return pages[table].reshape(len(table), -1, *pages.shape[2:])


def numbers(data: Array, scale: Array | None) -> np.ndarray:
    found = np.asarray(data).astype(np.float32)
    return found if scale is None else found * np.asarray(scale)[..., None]


@pytest.mark.parametrize("sinks", (0, 2))
def test_rolling_is_a_window_of_a_full_cache(sinks: int) -> None:
    """From before the window is full until the ring has gone round several times."""
    rolls, full = rolling(num_sink_tokens=sinks), plain()
    assert rolls.capacity == sinks + 5 + 3
    rng = np.random.default_rng(0)
    for turn in range(13):
        count = jnp.asarray(rng.integers(0, 4, BATCH))
        query, key, value = rows(10 * turn, 3)
        rolls, out, lse = step(rolls, query, key, value, count)
        full, right, right_lse = step_in_window(full, query, key, value, count, sinks)
        close("output", out, right)
        close("lse", lse, right_lse)
        np.testing.assert_array_equal(rolls.lengths, full.lengths)
    assert full.lengths.max() > 2 * rolls.capacity


@pytest.mark.parametrize("make", (plain, paged, rolling))
def test_int8(make: Any) -> None:
    """Each number within max |x| / 254 of its row, and attention of what is kept."""
    cache = make(dtype=jnp.int8)
    query, key, value = rows(0, 3)
    key = key.at[0, 1].set(0.0)
    cache = cache.append(key, value, jnp.array([3, 2, 0]))
    for name, given in (("key", key), ("value", value)):
        kept = contents(cache, name)
        for i, length in enumerate((3, 2, 0)):
            exact = np.asarray(given)[i, :length]
            bound = np.abs(exact).max(-1, keepdims=True) / 254 * (1 + 1e-5)
            assert (np.abs(kept[i, :length] - exact) <= bound).all()
    exact = eqxa.KVCache(
        jnp.asarray(contents(cache, "key")),
        jnp.asarray(contents(cache, "value")),
        cache.lengths,
    )
    close(
        "output",
        cache.attend(query, num_tokens=cache.lengths),
        exact.attend(query, num_tokens=cache.lengths),
    )


def test_int8_not_finite() -> None:
    """Such a row reads as NaN, and only who sees it gets NaN."""
    _, key, value = rows(0, 2)
    cache = plain(dtype=jnp.int8).append(key.at[0, 1, 0, 0].set(jnp.inf), value)
    assert np.isnan(contents(cache, "key")[0, 1, 0]).all()
    assert np.isfinite(contents(cache, "key")[0, 1, 1]).all()
    assert np.isfinite(contents(cache, "key")[1:]).all()


class Model:
    """What a cache in pages holds, as arrays."""

    def __init__(self) -> None:
        self.tokens = [np.zeros((0, HEADS, QK), np.float32) for _ in range(BATCH)]

    def check(self, cache: eqxa.PagedKVCache) -> None:
        kept = contents(cache, "key")
        table, counts = np.asarray(cache.page_table), np.asarray(cache.ref_counts)
        found = np.zeros_like(counts)
        for i, tokens in enumerate(self.tokens):
            assert cache.lengths[i] == len(tokens)
            np.testing.assert_array_equal(kept[i, : len(tokens)], tokens)
            np.add.at(found, table[i, : -(-len(tokens) // 4)], 1)
        np.testing.assert_array_equal(counts, found)
        assert cache.num_free_pages == (found == 0).sum()


@pytest.mark.parametrize("seed", range(3))
def test_pages_against_a_model(seed: int) -> None:
    """No page is lost or written to by two, whatever is appended, shared and freed."""
    rng = np.random.default_rng(seed)
    append = eqx.filter_jit(lambda cache, *args: cache.append(*args), donate="all")
    free = eqx.filter_jit(lambda cache, i: cache.free(i))
    share = eqx.filter_jit(lambda cache, i, j, n: cache.free(j).share(i, j, n))
    cache, model = paged(num_pages=16), Model()
    did = {"append": 0, "free": 0, "share": 0, "full": 0}
    for turn in range(150):
        what = rng.choice(["append", "append", "append", "free", "share"])
        if what == "append":
            count = rng.integers(0, 7, BATCH)
            _, key, value = rows(10 * turn, 6)
            keys = np.asarray(key)
            if needed(cache, count) is None:
                did["full"] += 1
                continue
            cache = append(cache, key, value, jnp.asarray(count))
            for i, n in enumerate(count):
                model.tokens[i] = np.concatenate([model.tokens[i], keys[i, :n]])
        elif what == "free":
            i = rng.integers(BATCH)
            cache, model.tokens[i] = free(cache, jnp.asarray(i)), model.tokens[i][:0]
        else:
            i, j = rng.choice(BATCH, 2, replace=False)
            n = rng.integers(len(model.tokens[i]) + 1)
            cache = share(cache, jnp.asarray(i), jnp.asarray(j), jnp.asarray(n))
            model.tokens[j] = model.tokens[i][:n].copy()
        did[what] += 1
        model.check(cache)
    assert min(did.values()) > 0, did


def needed(cache: eqxa.PagedKVCache, count: np.ndarray) -> int | None:
    """How many pages an append takes at most; None if that may be too many."""
    lengths = np.asarray(cache.lengths)
    if (lengths + count > cache.capacity).any():
        return None
    pages = int((-(-(lengths + count) // 4) - -(-lengths // 4) + 1).sum())
    return None if pages > cache.num_free_pages else pages


def test_a_shared_page_is_copied_once_less() -> None:
    """Where all who share it write at once, the last one keeps it."""
    _, key, value = rows(0, 6)
    cache = paged().append(key, value, jnp.array([6, 0, 0])).share(0, 1).share(0, 2)
    assert cache.num_free_pages == 22
    cache = cache.append(key[:, :1], value[:, :1])
    assert cache.num_free_pages == 20
    assert sorted(np.asarray(cache.ref_counts)[:5]) == [0, 1, 1, 1, 3]


def test_too_few_pages() -> None:
    _, key, value = rows(0, 9)
    cache = paged(num_pages=4)
    with pytest.raises(ValueError, match="not enough free pages"):
        cache.append(key, value)
    with pytest.raises(Exception, match="not enough free pages"):
        jax.block_until_ready(eqx.filter_jit(paged(4).append)(key, value))


@pytest.mark.parametrize("make", (plain, paged, rolling))
def test_written_in_place(make: Any) -> None:
    """With the old cache donated, nothing as large as the cache is copied."""
    _, key, value = rows(0, 1)

    def append(cache: AnyCache, key: Array, value: Array) -> AnyCache:
        return cache.append(key, value)

    # The size of the cache is what counts, so that it stands out.
    if make is paged:
        cache = eqxa.PagedKVCache.init(512, 64, BATCH, 100, HEADS, QK, V)
    elif make is rolling:
        cache = eqxa.RollingKVCache.init(BATCH, 9000, HEADS, QK, V)
    else:
        cache = eqxa.KVCache.init(BATCH, 9000, HEADS, QK, V)
    arrays, static = eqx.partition(cache, eqx.is_array)
    compiled = (
        jax.jit(
            lambda arrays, key, value: eqx.filter(
                append(eqx.combine(arrays, static), key, value), eqx.is_array
            ),
            donate_argnums=0,
        )
        .lower(arrays, key, value)
        .compile()
    )
    memory = compiled.memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.1 * size


@pytest.mark.parametrize("make", (plain, paged, rolling))
def test_vmap_and_scan(make: Any) -> None:
    query, key, value = (jnp.stack([x, 2 * x]) for x in rows(0, 3))
    count = jnp.array([[3, 1, 0], [2, 2, 3]])

    def two(cache: AnyCache, *xs: Array) -> tuple[AnyCache, Array]:
        for _ in range(2):
            cache, out, _ = step(cache, *xs)
        return cache, out

    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), make())
    _, outs = eqx.filter_vmap(two)(stacked, query, key, value, count)
    arrays, static = eqx.partition(make(), eqx.is_array)

    def body(arrays: Any, _: None) -> tuple[Any, Array]:
        cache, out, _ = step(
            eqx.combine(arrays, static), query[0], key[0], value[0], count[0]
        )
        return eqx.filter(cache, eqx.is_array), out

    _, scanned = jax.lax.scan(body, arrays, None, length=2)
    for i in range(2):
        _, alone = two(make(), query[i], key[i], value[i], count[i])
        close("vmap", outs[i], alone)
        if i == 0:
            close("scan", scanned[-1], alone)
