"""What the attention layers have in common: projections, and a cache between them."""

import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer, PRNGKeyArray

from ._cache import KVCache
from ._config import check_int
from ._jax import tree_map
from ._paged_cache import PagedKVCache
from ._rolling_cache import RollingKVCache
from ._typing import Number, int32
from .functional._options import ScoreOptions

Norm: TypeAlias = eqx.nn.RMSNorm | eqx.nn.LayerNorm
Cache = TypeVar("Cache", KVCache, RollingKVCache, PagedKVCache)
NumTokens: TypeAlias = int | Integer[Array, "*batch"]


def each(
    layer: Callable[[Array], Array], x: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`layer`, which takes one vector, of all vectors along the last axis of `x`."""
    for _ in range(x.ndim - 1):
        layer = jax.vmap(layer)
    return layer(x)


def project(
    layer: Callable[[Array], Array],
    x: Float[Array, "... in_size"],
    dtype: DTypeLike | None,
) -> Float[Array, "... out_size"]:
    """`layer` of each vector of `x`, in `dtype` if there is one."""
    if dtype is None:
        return each(layer, x)
    layer = tree_map(
        lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, layer
    )
    return each(layer, x.astype(dtype))


def split_heads(
    x: Float[Array, "*batch length size"], num_heads: int
) -> Float[Array, "*batch length heads head_size"]:
    """Vectors in which all heads lie one after the other, cut into those of each."""
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def join_heads(
    x: Float[Array, "*batch length heads head_size"],
) -> Float[Array, "*batch length size"]:
    """The inverse of `split_heads`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def check_dtype(name: str, dtype: DTypeLike | None) -> DTypeLike | None:
    """Refuses a dtype that is not floating."""
    if dtype is None:
        return None
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} is {dtype}, but must be a floating dtype")
    return dtype


def check_dropout_p(dropout_p: Number) -> None:
    """A probability lies between 0 and 1."""
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}, but must lie between 0 and 1")


def check_width(name: str, x: Array, size: int) -> None:
    """Refuses vectors of another width than a layer was made for."""
    if x.shape[-1] != size:
        raise ValueError(
            f"{name} has shape {x.shape}, but this layer takes vectors of {size} "
            "numbers"
        )


def dropout_prob_of(
    dropout: eqx.nn.Dropout, key: PRNGKeyArray | None, inference: bool | None
) -> Number:
    """The probability that a call drops a weight with; 0 in inference."""
    inference = dropout.inference if inference is None else inference
    if inference or dropout.p == 0:
        return 0.0
    if key is None:
        raise ValueError(
            f"key is None, but dropout_p is {dropout.p}: give a PRNG key, or "
            "inference=True"
        )
    return dropout.p


def count_from(start: int | Integer[Array, "..."], length: int) -> Int[Array, "..."]:
    """Positions from `start` on: a row for each of its entries."""
    start = int32("query_offset", jnp.asarray(start))[..., None]
    index = jnp.arange(length, dtype=jnp.int32)
    return start + index.reshape((1,) * (start.ndim - 1) + (length,))


def refuse_together(what: str, **given: object) -> None:
    """What can't be done together with `what` is an error, not ignored."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given together with {what}, but it can't be")


def same(cache: Cache) -> Cache:
    """The cache as it is."""
    return cache


def lengths_of(
    cache: KVCache | RollingKVCache | PagedKVCache, batch_shape: tuple[int, ...]
) -> Int[Array, "*batch"]:
    """The lengths of the cache's sequences, which are those of a query's batch axes.

    Without a batch axis that is a cache of one sequence, or, under `vmap`, what is left
    there of a cache of a batch: one sequence without a batch axis.
    """
    lengths = cache.lengths
    if lengths.ndim == 0 and isinstance(cache, PagedKVCache):
        raise ValueError(
            "cache is a PagedKVCache under vmap, but its pages belong to all "
            "sequences: call without vmap, on arrays with a batch axis"
        )
    if len(batch_shape) > 1 or math.prod(batch_shape) != lengths.size:
        raise ValueError(
            f"query has batch axes {batch_shape}, but cache is of {lengths.size} "
            "sequences: give the query one batch axis of as many, or put vmap over "
            "both query and cache"
        )
    return lengths.reshape(batch_shape)


def append_and_attend(
    cache: Cache,
    query: Float[Array, "*batch length q_heads qk_dim"],
    key: Float[Array, "*batch length kv_heads qk_dim"],
    value: Float[Array, "*batch length kv_heads v_dim"],
    num_tokens: NumTokens | None,
    *,
    block_size: int | None,
    read: Callable[[Cache], Cache] = same,
    **options: Unpack[ScoreOptions],
) -> tuple[Float[Array, "*batch length q_heads out_dim"], Cache]:
    """Attention of new tokens to all tokens, and the cache that has the new ones too.

    The batch axes are as in `lengths_of`. What is attended to is `read(cache)`.
    """
    _check_heads(cache, key, value)
    unbatched_cache, unbatched_query = cache.lengths.ndim == 0, query.ndim == 3
    if unbatched_cache:
        cache = tree_map(lambda x: x[None], cache)
    if unbatched_query:
        query, key, value = query[None], key[None], value[None]
    most = cache.max_rows if isinstance(cache, RollingKVCache) else cache.capacity
    if query.shape[-3] > most:
        raise ValueError(
            f"query has {query.shape[-3]} tokens, but cache takes at most {most} at "
            "once"
        )
    if isinstance(num_tokens, int):
        check_int("num_tokens", num_tokens)
        num_tokens = jnp.full_like(cache.lengths, num_tokens)
    elif num_tokens is not None:
        num_tokens = num_tokens.reshape(cache.lengths.shape)
    cache = cache.append(key, value, num_tokens)
    out = read(cache).attend(
        query, num_tokens=num_tokens, block_size=block_size, **options
    )
    if unbatched_query:
        out = out[0]
    if unbatched_cache:
        cache = tree_map(lambda x: x[0], cache)
    return out, cache


def _check_heads(
    cache: KVCache | RollingKVCache | PagedKVCache, key: Array, value: Array
) -> None:
    """The cache has the heads and the widths of what is to go in."""
    if isinstance(cache, PagedKVCache):
        rows = cache.key_pages, cache.value_pages
    else:
        rows = cache.key, cache.value
    held, got = (tuple(x.shape[-2:] for x in pair) for pair in (rows, (key, value)))
    if held != got:
        raise ValueError(
            f"cache has keys and values of (heads, width) {held[0]} and {held[1]}, but "
            f"this layer has {got[0]} and {got[1]}"
        )
