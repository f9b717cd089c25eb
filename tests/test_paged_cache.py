"""A cache in pages that has too few of them, and what it refuses."""

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

from .helpers import close, normal

pytestmark = pytest.mark.numbers

SIZE, BATCH = 4, 3


def empty(num_pages: int = 8, **options: Any) -> eqxa.PagedKVCache:
    return eqxa.PagedKVCache.init(num_pages, SIZE, BATCH, 5, 2, 3, **options)


def rows(seed: int, count: int) -> Array:
    return jnp.asarray(normal(seed, BATCH, count, 2, 3))


def kept(cache: eqxa.PagedKVCache, sequence: int) -> np.ndarray:
    pages = np.asarray(cache.key_pages)[np.asarray(cache.page_table)[sequence]]
    return pages.reshape(-1, 2, 3)[: int(cache.lengths[sequence])]


def check(cache: eqxa.PagedKVCache, tokens: list[np.ndarray]) -> None:
    """Tokens are those of the model, and no page is lost or counted wrongly."""
    table, counts = np.asarray(cache.page_table), np.asarray(cache.ref_counts)
    for i, expected in enumerate(tokens):
        np.testing.assert_array_equal(kept(cache, i), expected)
        in_use = np.arange(table.shape[1]) < -(-len(expected) // SIZE)
        np.testing.assert_array_equal(table[i] >= 0, in_use)
    found = np.bincount(table[table >= 0], minlength=len(counts))
    np.testing.assert_array_equal(counts, found)
    assert cache.num_free_pages == (found == 0).sum()


@pytest.fixture
def no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of traced arrays are not checked."""
    monkeypatch.setattr(_typing, "DEBUG", False)


@pytest.mark.usefixtures("no_debugging")
@pytest.mark.parametrize("seed", range(3))
def test_tokens_without_a_page_are_dropped(seed: int) -> None:
    """And nothing else is touched, though sequences share pages and fight for more."""
    rng = np.random.default_rng(seed)

    @jax.jit
    def append(cache: eqxa.PagedKVCache, key: Array, n: Array) -> eqxa.PagedKVCache:
        return cache.append(key, 2 * key, n)

    @jax.jit
    def free(cache: eqxa.PagedKVCache, i: Array) -> eqxa.PagedKVCache:
        return cache.free(i)

    @jax.jit
    def share(
        cache: eqxa.PagedKVCache, i: Array, j: Array, n: Array
    ) -> eqxa.PagedKVCache:
        return cache.share(i, j, n)

    cache, tokens = empty(num_pages=6), [np.zeros((0, 2, 3), np.float32)] * BATCH
    short = shared = 0
    for turn in range(200):
        i, j = rng.choice(BATCH, 2, replace=False)
        match rng.choice(["append", "append", "free", "share"]):
            case "append":
                count = rng.integers(0, 7, BATCH)
                key = rows(turn, 6)
                cache = append(cache, key, jnp.asarray(count))
                for s, n in enumerate(count):
                    stored = int(cache.lengths[s]) - len(tokens[s])
                    assert 0 <= stored <= n
                    # Where less is stored, there was no page, or no entry, for more.
                    if stored < n:
                        short += 1
                        full = len(tokens[s]) + stored == cache.capacity
                        assert full or cache.num_free_pages == 0
                    tokens[s] = np.concatenate([tokens[s], key[s, :stored]])
            case "free":
                cache, tokens[i] = free(cache, jnp.asarray(i)), tokens[i][:0]
            case _:
                n = int(rng.integers(len(tokens[i]) + 1))
                cache = share(cache, *(jnp.asarray(x) for x in (i, j, n)))
                if len(tokens[j]) == 0:
                    shared += n > 0
                    tokens[j] = tokens[i][:n]
        check(cache, tokens)
    assert short > 20
    assert shared > 3


@pytest.mark.usefixtures("no_debugging")
def test_the_last_waits_for_the_others() -> None:
    """Without a page to leave for, two sequences still share theirs: none writes."""
    key = rows(0, 6)
    cache = empty(2).append(key, key, jnp.array([6, 0, 0])).share(0, 1)
    before = np.asarray(cache.key_pages)
    for counts in ([1, 1, 0], [0, 1, 0], [5, 5, 1]):
        found = jax.jit(eqxa.PagedKVCache.append)(cache, key, key, jnp.array(counts))
        np.testing.assert_array_equal(found.lengths, [6, 6, 0])
        np.testing.assert_array_equal(found.key_pages, before)
        np.testing.assert_array_equal(found.ref_counts, cache.ref_counts)


@pytest.mark.parametrize("seed", range(2))
def test_attends_as_a_row_does(seed: int) -> None:
    """With all options, and in int8; after a prefix was shared, too."""
    rng = np.random.default_rng(seed)
    dtype = (jnp.float32, jnp.int8)[seed]
    cache = empty(12, dtype=dtype)
    row = eqxa.KVCache.init(BATCH, cache.capacity, 2, 3, dtype=dtype)
    key = rows(0, 6)
    counts = jnp.array([6, 0, 0])
    cache = cache.append(key, -key, counts).share(0, 2)
    both = key.at[2].set(key[0])
    row = row.append(both, -both, jnp.array([6, 0, 6]))
    for turn in range(3):
        key, counts = rows(turn, 3), jnp.asarray(rng.integers(0, 4, BATCH))
        cache, row = cache.append(key, -key, counts), row.append(key, -key, counts)
        query = jnp.asarray(normal(turn, BATCH, 3, 4, 3))
        options = {
            "num_tokens": counts,
            "sliding_window": 4,
            "num_sink_tokens": 1,
            "softmax_aux": jnp.ones(2),
            "sink_bias": jnp.ones(1),
            "bias": jnp.asarray(normal(9, 3, cache.capacity)),
        }
        found = cache.attend(query, block_size=4, return_lse=True, **options)
        expected = row.attend(query, return_lse=True, **options)
        close("output", found[0], expected[0])
        close("lse", found[1], expected[1])


def test_free_and_share_by_number() -> None:
    key = rows(0, 6)
    cache = empty().append(key, key)
    assert cache.num_free_pages == 2
    freed = cache.free(jnp.array([[0, 2], [2, 2]])).free(0)
    np.testing.assert_array_equal(freed.lengths, [0, 6, 0])
    assert freed.num_free_pages == 6
    shared = freed.share(1, 0, 4).share(1, 2, num_tokens=0)
    np.testing.assert_array_equal(shared.lengths, [4, 6, 0])
    assert shared.num_free_pages == 6
    assert sorted(np.asarray(shared.ref_counts)) == [0] * 6 + [1, 2]


WRONG: dict[str, tuple[Callable[[eqxa.PagedKVCache], Any], str]] = {
    "no such sequence": (lambda c: c.free(3), "sequence must lie between 0 and 2"),
    "a sequence below 0": (lambda c: c.free(-1), r"sequence = -1"),
    "one of several": (lambda c: c.free(jnp.array([0, 5])), r"sequence = \[0 5\]"),
    "no such source": (lambda c: c.share(3, 2), "source must lie between"),
    "no such target": (lambda c: c.share(0, 3), "target must lie between"),
    "a target with tokens": (lambda c: c.share(0, 1), "target must have no tokens"),
    "itself": (lambda c: c.share(0, 0), "target must have no tokens"),
    "too many tokens": (lambda c: c.share(0, 2, 7), "num_tokens"),
    "fewer than none": (lambda c: c.share(0, 2, -1), "num_tokens"),
    "too few pages": (
        lambda c: empty(2).append(rows(0, 4), rows(0, 4)),
        "not enough free pages.*: num_free_pages = 2",
    ),
    "more than max_pages": (
        lambda c: c.append(rows(0, 20), rows(0, 20)),
        "outgrows its capacity of 20",
    ),
    "more rows than fit": (lambda c: c.append(rows(0, 21), rows(0, 21)), "at most 20"),
    "width": (lambda c: c.append(rows(0, 1)[..., 1:], rows(0, 1)), "key has shape"),
    "size": (lambda c: empty(-1), "num_pages is -1"),
    "no slots": (lambda c: c.init(1, 0, 1, 1, 1, 1), "page_size is 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case: str) -> None:
    call, message = WRONG[case]
    key = rows(0, 6)
    cache = empty().append(key, key, jnp.array([6, 2, 0]))
    with pytest.raises(ValueError, match=message):
        call(cache)


def test_wrong_values_under_jit() -> None:
    key = rows(0, 6)
    cache = empty().append(key, key, jnp.array([6, 2, 0]))
    for call, message in (
        (lambda i: cache.free(i), "sequence must lie between 0 and 2"),
        (lambda i: cache.share(i, 2), "source must lie between 0 and 2"),
        (lambda i: cache.share(0, i - 2), "target must have no tokens"),
        (lambda i: cache.share(0, 2, i + 4), "num_tokens"),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(eqx.filter_jit(call)(jnp.asarray(3)))


def test_gradients_of_narrow_pages() -> None:
    """Those of pages in bfloat16 are not lost where a CPU reads them as integers."""
    key = rows(0, 6).astype(jnp.bfloat16)
    cache = empty(dtype=jnp.bfloat16).append(key, key)
    query = jnp.asarray(normal(1, BATCH, 4, 3))

    @jax.grad
    def slope(pages: Array) -> Array:
        cache_of = eqx.tree_at(lambda c: c.value_pages, cache, pages)
        return jnp.sum(cache_of.attend(query))

    found = np.asarray(slope(cache.value_pages)).astype(np.float32)
    # The weights of each query head's tokens sum to 1.
    np.testing.assert_allclose(found.sum((0, 1)), 2 * BATCH, rtol=2e-2)
