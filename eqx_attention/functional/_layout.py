"""Between the caller's axes and those that the backends compute with.

Callers write `*batch length heads dim`. Inside there is one batch axis, heads stand
before lengths, and query heads are split into (key head, place in its group), so that
no key is ever repeated.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def queries_by_head(
    x: Float[Array, "*batch q_len q_heads dim"], kv_heads: int
) -> Float[Array, "flat_batch {kv_heads} group q_len dim"]:
    """The queries of each head in a row."""
    *batch, q_len, q_heads, dim = x.shape
    grouped = (math.prod(batch), q_len, kv_heads, q_heads // kv_heads, dim)
    return jnp.moveaxis(x.reshape(grouped), 1, 3)


def keys_by_head(
    x: Float[Array, "*batch kv_len kv_heads dim"],
) -> Float[Array, "flat_batch kv_heads kv_len dim"]:
    """The keys, or values, of each head in a row."""
    return jnp.moveaxis(x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]), 1, 2)


def queries_by_position(
    x: Float[Array, "flat_batch kv_heads group q_len dim"], batch_shape: tuple[int, ...]
) -> Float[Array, "... q_len q_heads dim"]:
    """Back from `queries_by_head`."""
    _, kv_heads, group, q_len, dim = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(*batch_shape, q_len, kv_heads * group, dim)


def keys_by_position(
    x: Float[Array, "flat_batch kv_heads kv_len dim"],
) -> Float[Array, "flat_batch kv_len kv_heads dim"]:
    """Back from `keys_by_head`, with the one batch axis."""
    return jnp.moveaxis(x, 1, 2)


def rows_by_head(
    x: Float[Array, "flat_batch kv_heads group q_len"], batch_shape: tuple[int, ...]
) -> Float[Array, "... q_heads q_len"]:
    """One number for each query and head, for the caller."""
    _, kv_heads, group, q_len = x.shape
    return x.reshape(*batch_shape, kv_heads * group, q_len)


def flat_batch(
    x: Shaped[Array, "..."], batch_shape: tuple[int, ...], trailing: int
) -> Shaped[Array, "..."]:
    """One batch axis before the last `trailing` axes; 1 if all batch elements share."""
    own, rest = x.shape[: x.ndim - trailing], x.shape[x.ndim - trailing :]
    if all(size == 1 for size in own):
        return x.reshape(1, *rest)
    full = jnp.broadcast_to(x, (*batch_shape, *rest))
    return full.reshape(math.prod(batch_shape), *rest)


def matrix(
    x: Shaped[Array, "..."] | None,
    batch_shape: tuple[int, ...],
    q_heads: int,
    kv_heads: int,
) -> Shaped[Array, "b k g q kv"] | None:
    """A mask or a bias as `batch kv_heads group q_len kv_len`, where 1 broadcasts."""
    if x is None:
        return None
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    heads = x.shape[-3]
    split = (kv_heads, q_heads // kv_heads) if heads == q_heads else (heads, 1)
    x = x.reshape(*x.shape[:-3], *split, *x.shape[-2:])
    return flat_batch(x, batch_shape, 4)


def per_head(
    x: Float[Array, "..."] | None, q_heads: int, kv_heads: int
) -> Float[Array, "{kv_heads} group n"] | None:
    """Numbers for all heads, or for each, as numbers for each."""
    if x is None:
        return None
    each = jnp.broadcast_to(jnp.atleast_2d(x), (q_heads, x.shape[-1]))
    return each.reshape(kv_heads, q_heads // kv_heads, x.shape[-1])
