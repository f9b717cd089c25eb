"""Decoding: a few queries for each sequence, against its own part of a long cache.

One sequence after the other, block by block from its start to its end: what lies
outside is never read, so the cost follows the sum of the lengths. Derivatives of any
order and mode are those of the whole row of logits, whose size is that of the cache.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._jax import accumulation_dtype, vary_like, vary_together, varying_axes
from ._batch import map_batch
from ._block import attend_block, attend_tile, whole
from ._caches import Cache
from ._derivative import derivatives_of
from ._inputs import Operands, Problem
from ._logits import LogitRules, ScoreParameters
from ._online_softmax import SoftmaxState, no_keys
from ._schedule import Schedule
from ._tiles import Layout, Tile
from ._visibility import Visibility


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
    _, kv_heads, _, q_len, _ = query.shape
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
        own = Operands(query, key, value, parameters.cut(tile))
        allowed = rules.allowed(own.parameters, tile) if masked else None
        return attend_tile(state, own, rules, None, tile, allowed)[0]

    key, value = cache.block(sequence, start)
    dtype = accumulation_dtype(query, key, value)
    state = no_keys((*query.shape[:-1], value.shape[-1]), dtype)
    state = vary_like(state, varying_axes(query))
    return schedule.keys_for(start).walk(visit, state)
