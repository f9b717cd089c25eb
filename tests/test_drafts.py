"""Trees of drafts: each sees its ancestors, as if it were decoded after them alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers

# Draft i comes after draft PARENT[i], or after the last token that is certain.
PARENT = (-1, 0, 0, 2, -1, 4)
NUM_DRAFTS = len(PARENT)
LENGTHS = np.array([7, 3])
CAPACITY = 16


def path(draft: int) -> list[int]:
    """The draft's ancestors and itself, from the first on."""
    return [] if draft < 0 else [*path(PARENT[draft]), draft]


TREE = np.array([[j in path(i) for j in range(NUM_DRAFTS)] for i in range(NUM_DRAFTS)])


def rows(seed: int, count: int, heads: int = 1) -> np.ndarray:
    return normal(seed, 2, count, heads, 4)


QUERY, KEY, VALUE = rows(1, NUM_DRAFTS, 2), rows(2, NUM_DRAFTS), rows(3, NUM_DRAFTS)
PAST = rows(4, LENGTHS.max()), rows(5, LENGTHS.max())


def cached(drafts: list[int]) -> tuple[Array, Array]:
    """The tokens before, and then these drafts, for each sequence."""
    both: list[Array] = []
    for past, new in zip(PAST, (KEY, VALUE), strict=True):
        cache = np.full((2, CAPACITY, 1, 4), np.nan, np.float32)
        for i, length in enumerate(LENGTHS):
            cache[i, :length] = past[i, :length]
            cache[i, length : length + len(drafts)] = new[i, drafts]
        both.append(jnp.asarray(cache))
    return both[0], both[1]


def one_by_one(**options: Any) -> np.ndarray:
    """Each draft as the one new token after its ancestors."""
    outputs: list[Array] = []
    for draft in range(NUM_DRAFTS):
        ends = jnp.asarray(LENGTHS + len(path(draft)))
        out = eqxa.ragged_decode_attention(
            jnp.asarray(QUERY[:, draft]),
            *cached(path(draft)),
            *(jnp.zeros_like(ends), ends),
            **options,
        )
        outputs.append(out)
    return np.stack(outputs, axis=1)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": (2, 0)},
    "sinks": {"sliding_window": (1, 0), "num_sink_tokens": 2},
}


@pytest.mark.parametrize("block_size", (4, 16))
@pytest.mark.parametrize("name", OPTIONS)
def test_ragged(name: str, block_size: int) -> None:
    ends = jnp.asarray(LENGTHS + NUM_DRAFTS)
    out = eqxa.ragged_decode_attention(
        jnp.asarray(QUERY),
        *cached(list(range(NUM_DRAFTS))),
        *(jnp.zeros_like(ends), ends),
        mask=jnp.asarray(TREE),
        block_size=block_size,
        **OPTIONS[name],
    )
    close("output", out, one_by_one(**OPTIONS[name]))


def test_a_tree_for_each_sequence_and_starts() -> None:
    """The second has its drafts in a row, and both start later in the cache."""
    trees = jnp.asarray(np.stack([TREE, np.tri(NUM_DRAFTS, dtype=bool)])[:, None])
    start, ends = jnp.asarray([2, 1]), jnp.asarray(LENGTHS + NUM_DRAFTS)
    given = (jnp.asarray(QUERY), *cached(list(range(NUM_DRAFTS))), start, ends)

    @jax.jit
    def attend(trees: Array) -> Array:
        return eqxa.ragged_decode_attention(*given, mask=trees, block_size=4)

    out, plain = attend(trees), eqxa.ragged_decode_attention(*given)
    close("in a row", out[1], plain[1])
    alone = eqxa.ragged_decode_attention(*given, mask=jnp.asarray(TREE))
    close("tree", out[0], alone[0])
    assert not np.allclose(out[0], plain[0])


@pytest.mark.parametrize("kind", ("contiguous", "rolling", "paged"))
def test_caches(kind: str) -> None:
    """Padding among the rows is no draft."""
    window = {"sliding_window": (4, 0)} if kind != "rolling" else {}
    cache: Any = {
        "contiguous": lambda: eqxa.KVCache.init(2, CAPACITY, 1, 4, 4),
        "rolling": lambda: eqxa.RollingKVCache.init(2, (4, 0), 1, 4, 4, max_rows=8),
        "paged": lambda: eqxa.PagedKVCache.init(8, 4, 2, 4, 1, 4, 4),
    }[kind]()
    past, new = (jnp.asarray(x) for x in PAST), (KEY, VALUE)
    cache = cache.append(*past, jnp.asarray(LENGTHS))
    filled = ((0, 0), (0, 2), (0, 0), (0, 0))
    counts = jnp.full(2, NUM_DRAFTS, jnp.int32)
    cache = cache.append(*(jnp.asarray(np.pad(x, filled)) for x in new), counts)
    tree = np.pad(TREE, ((0, 2), (0, 2)), constant_values=True)
    out = cache.attend(
        jnp.asarray(np.pad(QUERY, filled)),
        num_tokens=counts,
        mask=jnp.asarray(tree),
        **window,
    )
    close("output", out[:, :NUM_DRAFTS], one_by_one(sliding_window=(4, 0)))
    assert not np.any(out[:, NUM_DRAFTS:])


@pytest.mark.parametrize("shape", ((1, 6), (2, 6, 6), (3, 1, 6, 6), (1, 1, 1, 6, 6)))
def test_errors(shape: tuple[int, ...]) -> None:
    """The tree is the same for all heads, and has a row for each draft."""
    ends = jnp.asarray(LENGTHS + NUM_DRAFTS)
    with pytest.raises(ValueError, match="over the last 6 keys"):
        eqxa.ragged_decode_attention(
            jnp.asarray(QUERY),
            *cached(list(range(NUM_DRAFTS))),
            *(jnp.zeros_like(ends), ends),
            mask=jnp.ones(shape, bool),
        )
