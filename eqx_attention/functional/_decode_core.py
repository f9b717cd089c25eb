"""Decoding: a few queries for each sequence, against its own part of a long cache.

One sequence after the other, block by block from its start to its end: what lies
outside is never read, so the cost follows the sum of the lengths. Derivatives of any
order and mode are those of the whole row of logits, whose size is that of the cache.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._jax import accumulation_dtype, on_cpu, vary_like, vary_together, varying_axes
from ._batch import map_batch
from ._block import attend_block, attend_products, attend_tile, whole
from ._caches import Cache
from ._derivative import derivatives_of
from ._layout import keys_by_head, keys_by_position
from ._logits import LogitRules, ScoreParameters, drop_unseen
from ._online_softmax import SoftmaxState, no_keys
from ._problem import Operands, Problem
from ._schedule import Schedule
from ._tiles import Layout, Tile, merge_rows
from ._visibility import Visibility

_FEW = 8
"""Up to so many queries for each key head are multiplied without matrix products."""


def decode_state(
    query: Float[Array, "batch kv_heads group q_len qk_dim"],
    cache: Cache,
    parameters: ScoreParameters,
    rules: LogitRules,
) -> SoftmaxState:
    """The state of every query after the keys of its sequence."""
    if 0 in (*query.shape, cache.capacity):
        return _whole_rows(query, cache, parameters, rules=rules)
    query, cache, parameters, rules = vary_together((query, cache, parameters, rules))
    state = _attend(query, cache, parameters, rules=rules)
    return SoftmaxState(
        state.numerator, jax.lax.stop_gradient(state.max_logits), state.denominator
    )


def _whole_rows(
    query: Float[Array, "batch kv_heads group q_len qk_dim"],
    cache: Cache,
    parameters: ScoreParameters,
    *,
    rules: LogitRules,
) -> SoftmaxState:
    key, value = cache.contents()
    problem = Problem(Operands(query, key, value, parameters), rules, None)
    return attend_block(problem, whole(problem))[0]


@derivatives_of(_whole_rows)
def _attend(
    query: Float[Array, "batch kv_heads group q_len qk_dim"],
    cache: Cache,
    parameters: ScoreParameters,
    *,
    rules: LogitRules,
) -> SoftmaxState:
    batch = query.shape[0]

    def one(
        sequence: Int[Array, "1"],
        query: Float[Array, "1 kv_heads group q_len qk_dim"],
        bias: Float[Array, "..."] | None,
        visibility: Visibility,
    ) -> SoftmaxState:
        own = ScoreParameters(parameters.scale, bias, parameters.sink_bias)
        own_rules = rules.with_visibility(visibility)
        return _walk_blocks(sequence[0], query, cache, own, own_rules)

    return map_batch(
        one,
        jnp.arange(batch, dtype=jnp.int32),
        query,
        parameters.bias,
        rules.visibility,
        batch=batch,
    )


def _walk_blocks(
    sequence: Int[Array, ""],
    query: Float[Array, "1 kv_heads group q_len qk_dim"],
    cache: Cache,
    parameters: ScoreParameters,
    rules: LogitRules,
) -> SoftmaxState:
    """One sequence's queries against the blocks of its cache that hold work."""
    _, kv_heads, group, q_len, _ = query.shape
    schedule = Schedule(
        rules.visibility, parameters.bias, q_len, q_len, cache.block_size
    )
    start = jnp.int32(0)

    def visit(block: Int[Array, ""], state: SoftmaxState, masked: bool) -> SoftmaxState:
        tile = Tile(
            *(start, start, block * cache.block_size),
            *(kv_heads, q_len, cache.block_size),
            Layout.KEYS_MINOR,
        )
        key, value = cache.block(sequence, block)
        own = parameters.cut(tile)
        allowed = rules.allowed(own, tile) if masked else None
        if on_cpu() and group * q_len <= _FEW:
            value = drop_unseen(keys_by_head(value), allowed, tile)
            products, weighted_sum = _by_hand(query, key, keys_by_position(value))
            return attend_products(
                state, products, weighted_sum, own, rules, tile, allowed, dtype
            )[0]
        own = Operands(query, keys_by_head(key), keys_by_head(value), own)
        return attend_tile(state, own, rules, None, tile, allowed)[0]

    key, value = cache.block(sequence, start)
    dtype = accumulation_dtype(query, key, value)
    state = no_keys((*query.shape[:-1], value.shape[-1]), dtype)
    state = vary_like(state, varying_axes(query))
    return schedule.keys_for(start).walk(visit, state)


def _by_hand(
    query: Float[Array, "1 kv_heads group q_len qk_dim"],
    key: Float[Array, "1 size kv_heads qk_dim"],
    value: Float[Array, "1 size kv_heads v_dim"],
) -> tuple[
    Float[Array, "1 kv_heads group q_len size"],
    Callable[[Float[Array, "kv_heads rows size"]], Float[Array, "kv_heads rows v_dim"]],
]:
    """Products of queries and keys, and what sums up values, as multiply and add.

    For each element of the cache there is so little to do that on a CPU its reading
    takes the time. Matrix products want heads first, and copy the block for that.
    """
    dtype = accumulation_dtype(query, key, value)
    rows = merge_rows(query, 2).astype(dtype)
    products = jnp.sum(key[0, :, :, None].astype(dtype) * rows[None], axis=-1)
    products = jnp.moveaxis(products, 0, -1)

    def weighted_sum(weights: Array) -> Array:
        weights = jnp.moveaxis(weights, -1, 0)[..., None]
        return jnp.sum(weights * value[0, :, :, None].astype(dtype), axis=0)

    return products.reshape(*query.shape[:-1], key.shape[1]), weighted_sum
