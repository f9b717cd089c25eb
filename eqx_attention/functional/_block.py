"""Attention of some queries to all keys at once, differentiable by JAX itself.

Standard attention is this for all queries. The chunked backends take their derivatives
of second order, and ragged decoding all of its derivatives, from it.
"""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from .._jax import map_, pad, tree_map
from ._dropout import Dropout
from ._logits import LogitRules, contract, drop_unseen
from ._online_softmax import SoftmaxState, absorb
from ._problem import Operands, Problem
from ._score import ScoreParameters
from ._tiles import Layout, Tile, merge_rows

_Out = TypeVar("_Out")

_ROWS = 128
"""Queries at a time in `map_rows`: their logits are its largest array."""


def attend_tile(
    state: SoftmaxState | None,
    operands: Operands,
    rules: LogitRules,
    dropout: Dropout | None,
    tile: Tile,
    allowed: Bool[Array, "..."] | None,
) -> tuple[SoftmaxState, Float[Array, "batch kv_heads group q_size kv_size"]]:
    """`state` after a tile as well, and the tile's logits.

    The operands are those of the tile.
    """
    value = drop_unseen(operands.value, allowed, tile)
    products = rules.products(operands.query, operands.key, tile.layout)

    def weighted_sum(weights: Array) -> Array:
        if dropout is not None:
            kept = dropout.apply(weights.reshape(products.shape), tile)
            weights = kept.reshape(weights.shape)
        merged = value.reshape(*weights.shape[:-2], *value.shape[-2:])
        return contract("...ts,...sd->...td", weights, merged, rules.precision)

    return attend_products(
        *(state, products, weighted_sum),
        *(operands.parameters, rules, tile, allowed, operands.accumulator),
    )


def attend_products(
    state: SoftmaxState | None,
    products: Float[Array, "batch kv_heads group q_size kv_size"],
    weighted_sum: Callable[[Float[Array, "..."]], Float[Array, "..."]],
    parameters: ScoreParameters,
    rules: LogitRules,
    tile: Tile,
    allowed: Bool[Array, "..."] | None,
    dtype: DTypeLike,
) -> tuple[SoftmaxState, Float[Array, "batch kv_heads group q_size kv_size"]]:
    """As `attend_tile`, of products that are made already.

    `weighted_sum` takes the weights to the sums of values, both as `merge_rows` makes
    them.
    """
    logits = rules.logits(products, parameters, tile, allowed)
    if state is not None:
        state = tree_map(lambda x: merge_rows(x, 2), state)
    state = absorb(state, merge_rows(logits, 2), weighted_sum, dtype)
    rows = logits.shape[:-1]
    return SoftmaxState(
        state.numerator.reshape(*rows, state.numerator.shape[-1]),
        state.max_logits.reshape(rows),
        state.denominator.reshape(rows),
    ), logits


def attend_block(
    problem: Problem, tile: Tile
) -> tuple[SoftmaxState, Float[Array, "batch kv_heads group q_size kv_len"]]:
    """The state of the tile's queries after all keys, and their logits.

    The operands of `problem` hold the tile's queries alone.
    """
    operands, rules = problem.operands, problem.rules
    parameters = operands.parameters.cut(tile)
    allowed = rules.allowed(parameters, tile)
    query, key = operands.query, operands.key
    if allowed is not None:
        # Queries that see nothing, and keys that nothing sees, may hold NaN, which
        # must not come into the gradients of the others.
        sees = jnp.any(allowed, axis=-1, keepdims=True)
        query = jnp.where(sees, query, jnp.zeros_like(query))
        key = drop_unseen(key, allowed, tile)
    operands = Operands(query, key, operands.value, parameters).with_scaled_query()
    return attend_tile(None, operands, rules, problem.dropout, tile, allowed)


def whole(problem: Problem) -> Tile:
    """All queries and all keys."""
    return rows_of(problem, jnp.int32(0), problem.operands.query.shape[3])


def rows_of(problem: Problem, q_start: Int[Array, ""], q_size: int) -> Tile:
    """Some queries, of all heads, and all keys."""
    _, kv_heads, group, _, _ = problem.operands.query.shape
    zero, kv_len = jnp.int32(0), problem.operands.key.shape[2]
    return Tile(
        *(zero, q_start, zero),
        *(kv_heads, group, q_size, kv_len),
        Layout.KEYS_MINOR,
    )


def attend_rows(problem: Problem) -> SoftmaxState:
    """Attention by chunks of queries, each against all keys, recomputed in reverse."""
    return map_rows(problem, lambda part, tile: attend_block(part, tile)[0])


def map_rows(problem: Problem, function: Callable[[Problem, Tile], _Out]) -> _Out:
    """`function(part, tile)` of chunks of queries against all keys, put together again.

    Memory grows with the length and not with its square, in derivatives of any order:
    what is not kept is made again in reverse.
    """
    query = problem.operands.query
    q_len = query.shape[3]
    size = min(_ROWS, q_len)
    count = -(-q_len // size)
    query = pad_to(query, count * size, axis=3)

    def rows(chunk: Int[Array, ""]) -> _Out:
        start = chunk * size
        part = lax.dynamic_slice_in_dim(query, start, size, axis=3)
        return function(problem.with_query(part), rows_of(problem, start, size))

    outs = map_(eqx.filter_checkpoint(rows), jnp.arange(count, dtype=jnp.int32))
    return tree_map(lambda x: join_chunks(x, axis=3, length=q_len), outs)


def pad_to(x: Float[Array, "..."], length: int, *, axis: int) -> Float[Array, "..."]:
    """`x` with zeros at the end of `axis`, up to `length`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return pad(x, widths)


def join_chunks(
    x: Float[Array, "chunks ..."], *, axis: int, length: int
) -> Float[Array, "..."]:
    """Chunks, stacked in front, one after the other along `axis`; cut to `length`."""
    x = jnp.moveaxis(x, 0, axis)
    joined = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x.reshape(joined), 0, length, axis=axis)
