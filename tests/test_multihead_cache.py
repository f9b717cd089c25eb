"""MultiheadAttention through a cache: in chunks it computes what it does at once."""

from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers

Layer: TypeAlias = eqxa.MultiheadAttention
AnyCache: TypeAlias = eqxa.KVCache | eqxa.RollingKVCache | eqxa.PagedKVCache
CHUNKS = 4, 4, 1


def layer_of(**options: Any) -> Layer:
    return Layer(
        num_heads=4,
        query_size=6,
        qk_size=4,
        vo_size=3,
        num_kv_heads=2,
        causal=True,
        rotary=eqxa.RotaryEmbedding(4),
        qk_norm=eqx.nn.RMSNorm,
        num_sinks=1,
        key=jax.random.key(0),
        **options,
    )


def cache_of(kind: str, batch_size: int) -> AnyCache:
    """An empty cache with room for ten tokens of each sequence."""
    match kind:
        case "rolling":
            return eqxa.RollingKVCache.init(
                *(batch_size, 3, 2, 4, 3), num_sink_tokens=1, max_rows=4
            )
        case "paged":
            return eqxa.PagedKVCache.init(12, 2, batch_size, 5, 2, 4, 3)
        case _:
            return eqxa.KVCache.init(batch_size, 10, 2, 4, 3)


WINDOW: dict[str, Any] = {"sliding_window": (3, 0), "num_sink_tokens": 1}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {"logits_soft_cap": 3.0, "output_gate": True},
    "rolling": WINDOW,
    "paged": {**WINDOW, "chunk_sizes": eqxa.ChunkSizes(2, 3)},
}


def in_chunks(call: Any, x: Array, cache: AnyCache) -> tuple[Array, AnyCache]:
    """`call` of one part after the other along the next to last axis."""
    outs: list[Array] = []
    for part in jnp.split(x, np.cumsum(CHUNKS)[:-1], axis=-2):
        out, cache = call(part, cache)
        outs.append(out)
    return jnp.concatenate(outs, axis=-2), cache


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_batch(kind: str) -> None:
    layer, x = layer_of(**KINDS[kind]), jnp.asarray(normal(0, 2, 9, 6))
    call = eqx.filter_jit(lambda x, cache: layer(x, x, x, cache=cache))
    found, cache = in_chunks(call, x, cache_of(kind, 2))
    close("output", found, layer(x, x, x))
    np.testing.assert_array_equal(cache.lengths, [9, 9])


@pytest.mark.parametrize("kind", ("whole", "rolling"))
def test_chunks_under_vmap(kind: str) -> None:
    """Each call has one sequence of the query, and of the cache of a batch."""
    layer, x = layer_of(**KINDS[kind]), jnp.asarray(normal(0, 2, 9, 6))
    call = eqx.filter_jit(jax.vmap(lambda x, cache: layer(x, x, x, cache=cache)))
    found, cache = in_chunks(call, x, cache_of(kind, 2))
    close("output", found, layer(x, x, x))
    assert jax.tree.structure(cache) == jax.tree.structure(cache_of(kind, 2))


def test_init_cache() -> None:
    cache = layer_of().init_cache(2, 10, dtype=jnp.bfloat16)
    expected = eqxa.KVCache.init(2, 10, 2, 4, 3, dtype=jnp.bfloat16)
    assert eqx.tree_equal(cache, expected)


def test_one_sequence() -> None:
    """A query without a batch axis, and a cache of one sequence."""
    layer, x = layer_of(), jnp.asarray(normal(0, 4, 6))
    call = eqx.filter_jit(lambda x, cache: layer(x, x, x, cache=cache))
    found, cache = call(x, cache_of("paged", 1))
    close("output", found, layer(x, x, x))
    assert cache.lengths.shape == (1,)


@pytest.mark.parametrize("kind", ("rolling", "paged"))
def test_ragged_chunks(kind: str) -> None:
    """Sequences take as many of the tokens as they have; the rest is padding."""
    layer, x = layer_of(**KINDS[kind]), jnp.asarray(normal(0, 2, 9, 6))
    cache, whole = cache_of(kind, 2), layer(x, x, x)
    call = eqx.filter_jit(lambda x, n, c: layer(x, x, x, cache=c, num_tokens=n))
    done = np.zeros(2, int)
    for counts in ((3, 1), (0, 2), (2, 3)):
        rows = np.stack([np.asarray(x[i, n : n + 3]) for i, n in enumerate(done)])
        out, cache = call(jnp.asarray(rows), jnp.asarray(counts), cache)
        for i, (begin, count) in enumerate(zip(done, counts, strict=True)):
            close("output", out[i, :count], whole[i, begin : begin + count])
        done += counts
        np.testing.assert_array_equal(cache.lengths, done)


def test_one_number_of_tokens() -> None:
    """A plain int, or under `vmap` a number for each."""
    layer, x = layer_of(), jnp.asarray(normal(0, 2, 4, 6))

    @eqx.filter_jit
    def run(x: Array, cache: eqxa.KVCache, counts: Array) -> tuple[Array, Array, Array]:
        def one(x: Array, cache: eqxa.KVCache, n: Array) -> tuple[Array, eqxa.KVCache]:
            return layer(x, x, x, cache=cache, num_tokens=n)

        out, alike = layer(x, x, x, cache=cache, num_tokens=3)
        return out, alike.lengths, jax.vmap(one)(x, cache, counts)[1].lengths

    out, alike, each = run(x, cache_of("whole", 2), jnp.array([3, 1]))
    close("output", out[:, :3], layer(x, x, x)[:, :3])
    np.testing.assert_array_equal(alike, [3, 3])
    np.testing.assert_array_equal(each, [3, 1])


def test_masks_and_biases_of_the_cache() -> None:
    layer, x = layer_of(), jnp.asarray(normal(0, 2, 9, 6))
    mask = jnp.asarray(normal(1, 2, 1, 1, 10) > -1)
    bias = jnp.asarray(normal(2, 4, 1, 10))
    positions = jnp.asarray(np.arange(9)[::-1])
    expected = layer(
        *(x, x, x, mask[..., :9]), bias=bias[..., :9], q_positions=positions
    )
    found, _ = eqx.filter_jit(layer)(
        *(x, x, x, mask), bias=bias, q_positions=positions, cache=cache_of("whole", 2)
    )
    close("output", found, expected)


def test_generation_in_a_scan() -> None:
    """The cache as a carry, as one decodes on a device."""
    layer, x = layer_of(), jnp.asarray(normal(0, 9, 2, 1, 6))

    @eqx.filter_jit
    def run(cache: eqxa.KVCache) -> tuple[eqxa.KVCache, Array]:
        def step(cache: eqxa.KVCache, x: Array) -> tuple[eqxa.KVCache, Array]:
            out, cache = layer(x, x, x, cache=cache)
            return cache, out

        return jax.lax.scan(step, cache, x)

    whole = jnp.swapaxes(x[:, :, 0], 0, 1)
    _, found = run(cache_of("whole", 2))
    close("output", jnp.swapaxes(found[:, :, 0], 0, 1), layer(whole, whole, whole))


def call(layer: Layer, kind: str = "whole", batch_size: int = 2, **options: Any) -> Any:
    x = jnp.zeros((2, 3, 6))
    return layer(
        x, x, options.pop("value", x), cache=cache_of(kind, batch_size), **options
    )


def other(**options: Any) -> Layer:
    options = {"causal": True, "num_kv_heads": 2, "qk_size": 4, "vo_size": 3, **options}
    return Layer(4, 6, **options, key=jax.random.key(0))


def under_vmap() -> Any:
    x, layer = jnp.zeros((2, 3, 6)), layer_of()
    cache = jax.tree.map(lambda x: jnp.stack([x, x]), cache_of("paged", 1))
    return jax.vmap(lambda x, c: layer(x, x, x, cache=c))(
        x, eqx.tree_at(lambda c: c.lengths, cache, jnp.zeros(2, jnp.int32))
    )


X = jnp.zeros((2, 3, 6))
WRONG: dict[str, tuple[Any, str]] = {
    "heads": (
        lambda: call(other(num_kv_heads=4)),
        r"cache has keys and values of \(heads, width\) \(2, 4\) and \(2, 3\), but "
        r"this layer has \(4, 4\) and \(4, 3\)",
    ),
    "widths": (lambda: call(other(vo_size=2), "paged"), r"and \(2, 2\)"),
    "batch": (
        lambda: call(other(), batch_size=3),
        r"query has batch axes \(2,\), but cache is of 3 sequences",
    ),
    "pages under vmap": (under_vmap, "cache is a PagedKVCache under vmap"),
    "not causal": (lambda: call(other(causal=False)), "causal is False"),
    "window": (
        lambda: call(other(sliding_window=2), "rolling"),
        "cache keeps a window of 3 and 1 sink tokens, but this layer has "
        "sliding_window = 2",
    ),
    "lengths": (
        lambda: other()(X, X[:, :2], X[:, :2], cache=cache_of("whole", 2)),
        "query has 3 tokens and key_ 2",
    ),
    "too many": (
        lambda: other(sliding_window=3, num_sink_tokens=1)(
            *[jnp.zeros((2, 5, 6))] * 3, cache=cache_of("rolling", 2)
        ),
        "query has 5 tokens, but cache takes at most 4 at once",
    ),
    "projected": (
        lambda: other()(X, other().project_kv(X, X), cache=cache_of("whole", 2)),
        "key_ is a ProjectedKV, which needs no cache",
    ),
    "process_heads": (
        lambda: call(other(), process_heads=lambda q, k, v: (q, k, v)),
        "process_heads is given together with cache",
    ),
    "segments": (
        lambda: call(other(), q_segment_ids=jnp.zeros(3, int)),
        "q_segment_ids is given together with cache",
    ),
    "offset": (lambda: call(other(), query_offset=1), "query_offset is given toge"),
    "dropout": (
        lambda: call(other(dropout_p=0.5), key=jax.random.key(0)),
        "dropout is given together with cache",
    ),
    "num_tokens": (lambda: call(other(), num_tokens=4), "num_tokens must lie between"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    wrong, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        wrong()
