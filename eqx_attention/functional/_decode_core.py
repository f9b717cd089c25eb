"""Decoding: a few queries for each sequence, against its own part of a long cache.

Block by block from each sequence's start to its end: what lies outside is never read,
so the cost follows the sum of the lengths. Derivatives of any order and mode are those
of the whole row of logits, whose size is that of the cache.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._jax import (
    accumulation_dtype,
    on_cpu,
    tree_map,
    vary_like,
    vary_together,
    varying_axes,
)
from ._block import attend_block, attend_products, whole
from ._caches import Cache
from ._derivative import derivatives_of
from ._layout import keys_by_head, keys_by_position
from ._logits import LogitRules, contract, drop_unseen
from ._online_softmax import SoftmaxState, merge_all, no_keys
from ._problem import Operands, Problem
from ._schedule import Schedule
from ._score import ScoreParameters
from ._tiles import Layout, Tile, merge_rows

_LANES = 64
"""Blocks at a time where there are many cores."""


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
        state.numerator, lax.stop_gradient(state.max_logits), state.denominator
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
    batch, kv_heads, group, q_len, _ = query.shape
    size, zero = cache.block_size, jnp.int32(0)
    schedule = Schedule(rules.visibility, parameters, kv_heads, group, q_len, size)
    # A CPU has a core or two for each product already, and is slower on several at
    # once, whose blocks it has to gather.
    deal = schedule.deal(zero, batch=batch, lanes=1 if on_cpu() else _LANES)
    key, value = cache.block(zero, zero)
    dtype = accumulation_dtype(query, key, value)

    def visit(
        sequence: Int[Array, ""],
        block: Int[Array, ""],
        active: Bool[Array, ""] | None,
        states: SoftmaxState,
    ) -> SoftmaxState:
        def own(x: Array) -> Array:
            return x if x.shape[0] == 1 else lax.dynamic_slice_in_dim(x, sequence, 1)

        tile = Tile(
            *(zero, zero, block * size),
            *(kv_heads, group, q_len, size),
            Layout.KEYS_MINOR,
        )
        score = tree_map(own, parameters.score)
        part = ScoreParameters(parameters.scale, score).cut(tile)
        own_rules = rules.with_visibility(tree_map(own, rules.visibility))
        key, value = cache.block(sequence, block)
        allowed = None
        if active is not None:
            allowed = jnp.broadcast_to(active, (1, 1, 1, 1, 1))
            visible = own_rules.allowed(part, tile)
            allowed = allowed if visible is None else allowed & visible
            value = keys_by_position(drop_unseen(keys_by_head(value), allowed, tile))
        rows = merge_rows(own(query), 2)

        # A product for each head, of its part of the block as it lies there: one
        # product of all heads wants heads first, and copies the block for that.
        def by_head(spec: str, x: Array, block: Array) -> Array:
            block = block.astype(dtype)
            of_head = [
                contract(spec, x[head], block[0, :, head], rules.precision)
                for head in range(kv_heads)
            ]
            return jnp.stack(of_head)

        products = by_head("rd,sd->rs", rows.astype(dtype), key)
        products = products.reshape(1, kv_heads, -1, q_len, size)

        def weighted_sum(weights: Array) -> Array:
            return by_head("rs,sd->rd", weights.astype(dtype), value)

        state = attend_products(
            *(tree_map(own, states), products, weighted_sum),
            *(part, own_rules, tile, allowed, dtype),
        )[0]

        def put(name: Callable[[SoftmaxState], Array]) -> Array:
            new = name(state)
            return lax.dynamic_update_slice_in_dim(name(states), new, sequence, 0)

        return SoftmaxState(
            put(lambda x: x.numerator),
            put(lambda x: x.max_logits),
            put(lambda x: x.denominator),
        )

    states = no_keys((*query.shape[:-1], value.shape[-1]), dtype)
    states = vary_like(states, varying_axes(query))
    return merge_all(deal.walk(visit, states))
