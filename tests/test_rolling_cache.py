"""A rolling cache keeps what its window needs, and refuses what it can't do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers

BATCH = 3


def empty(window: Any = 5, **options: Any) -> eqxa.RollingKVCache:
    return eqxa.RollingKVCache.init(BATCH, window, 2, 3, 4, **options)


def rows(seed: int, count: int) -> tuple[Array, Array]:
    return (
        jnp.asarray(normal(seed, BATCH, count, 2, 3)),
        jnp.asarray(normal(seed + 1, BATCH, count, 2, 4)),
    )


@pytest.mark.parametrize(
    ("window", "sinks", "max_rows"), ((5, 2, 3), ((0, 4), 1, 1), ((3, None), 0, 2))
)
@pytest.mark.parametrize("block_size", (None, 2))
def test_keeps_sinks_and_window(
    window: Any, sinks: int, max_rows: int, block_size: int | None
) -> None:
    """Token by token what was appended; all options come out as of a full cache."""
    left = window if isinstance(window, int) else window[0]
    cache = empty(window, num_sink_tokens=sinks, max_rows=max_rows)
    assert cache.capacity == sinks + left + max_rows
    full = eqxa.KVCache.init(BATCH, 80, 2, 3, 4)
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {
        "softmax_aux": jnp.ones(2),
        "sink_bias": jnp.asarray(normal(3, 4, sinks)),
        "logits_soft_cap": 2.0,
    }

    @jax.jit
    def step(
        cache: eqxa.RollingKVCache, full: eqxa.KVCache, seed: Any, counts: Array
    ) -> Any:
        key, value, query = seed
        cache, full = cache.append(key, value, counts), full.append(key, value, counts)
        return (
            (cache, full),
            cache.attend(
                query,
                num_tokens=counts,
                block_size=block_size,
                return_lse=True,
                **options,
            ),
            full.attend(
                query,
                num_tokens=counts,
                return_lse=True,
                sliding_window=window,
                num_sink_tokens=sinks,
                **options,
            ),
        )

    for turn in range(24):
        counts = jnp.asarray(rng.integers(0, max_rows + 1, BATCH))
        query = jnp.asarray(normal(turn, BATCH, max_rows, 4, 3))
        (cache, full), found, expected = step(
            cache, full, (*rows(turn, max_rows), query), counts
        )
        close("output", found[0], expected[0])
        close("lse", found[1], expected[1])
        for i, positions in enumerate(np.asarray(cache.positions)):
            length, slots = int(full.lengths[i]), np.flatnonzero(positions < 2**29)
            at = positions[slots]
            needed = {p for p in range(length) if p < sinks or p >= length - left}
            assert needed <= set(at.tolist())
            np.testing.assert_array_equal(cache.key[i, slots], full.key[i, at])
            np.testing.assert_array_equal(cache.value[i, slots], full.value[i, at])


def test_old_tokens_are_gone() -> None:
    """What a slot held before is neither seen nor differentiated, NaN included."""
    cache = empty(2, max_rows=2)
    key, value = rows(0, 2)
    cache = cache.append(key.at[:].set(jnp.nan), value.at[:].set(jnp.inf))
    for seed in range(1, 4):
        cache = cache.append(*rows(seed, 2))
    query = jnp.asarray(normal(9, BATCH, 4, 3))
    assert np.isfinite(cache.attend(query)).all()
    assert np.isfinite(jax.grad(lambda q: cache.attend(q).sum())(query)).all()


def test_scan_without_end() -> None:
    """The carry of a scan keeps its types, and memory its size."""
    cache = empty(num_sink_tokens=1)
    key, value = rows(0, 1)

    def step(cache: eqxa.RollingKVCache, _: None) -> tuple[eqxa.RollingKVCache, Array]:
        cache = cache.append(key, value)
        return cache, cache.attend(jnp.ones((BATCH, 4, 3)))

    cache, outs = jax.lax.scan(step, cache, None, length=50)
    np.testing.assert_array_equal(cache.lengths, [50] * BATCH)
    assert cache.capacity == 7
    # Every token has the same value.
    close("last", outs[-1], np.repeat(value[:, 0], 2, axis=1))


QUERY = jnp.ones((BATCH, 2, 4, 3))
WRONG: dict[str, tuple[Callable[[eqxa.RollingKVCache], Any], str]] = {
    "mask": (lambda c: c.attend(QUERY, mask=jnp.ones(7, bool)), "mask"),
    "bias": (lambda c: c.attend(QUERY, bias=jnp.ones(7)), "bias"),
    "window": (lambda c: c.attend(QUERY, sliding_window=3), "sliding_window"),
    "sinks": (lambda c: c.attend(QUERY, num_sink_tokens=1), "num_sink_tokens"),
    "queries": (lambda c: c.attend(jnp.ones((BATCH, 3, 4, 3))), "max_rows = 2"),
    "rows": (lambda c: c.append(*rows(0, 3)), "num_rows at most 2"),
    "too many tokens": (
        lambda c: c.append(*rows(0, 2), jnp.array([0, 3, 0])),
        r"num_tokens must lie between 0 and 2.*num_tokens = \[0 3 0\]",
    ),
    "no bound": (lambda c: empty((None, 0)), "window"),
    "negative": (lambda c: empty(-1), "window"),
    "no rows": (lambda c: empty(max_rows=0), "max_rows"),
    "negative sinks": (lambda c: empty(num_sink_tokens=-1), "num_sink_tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(empty(max_rows=2))
