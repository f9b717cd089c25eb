"""The forward pass of flash attention: chunks of queries against chunks of keys.

The scheme is that of Dao et al. 2022 (arXiv 2205.14135) and Dao 2023 (2307.08691): for
one chunk of queries after the other, a running softmax over the chunks of keys that
hold work. Nothing that is kept grows faster than the length.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .._jax import map_, tree_map, vary_like, varying_axes
from ._batch import map_batch
from ._block import attend_tile, join_chunks, pad_to
from ._layout import keys_by_position, queries_by_position
from ._online_softmax import SoftmaxState, no_keys
from ._problem import Operands, Problem
from ._schedule import Schedule
from ._tiles import Layout, Tile, TileSizes


def forward(problem: Problem, sizes: TileSizes) -> SoftmaxState:
    """The state of every query after all keys. `sizes` are at most the lengths."""
    if not problem.walks_apart(sizes):
        return _together(problem, sizes)

    def one(*element: PyTree) -> SoftmaxState:
        return _together(problem.element(*element), sizes)

    batch = problem.operands.query.shape[0]
    return map_batch(one, *problem.by_element, batch=batch)


def _together(problem: Problem, sizes: TileSizes) -> SoftmaxState:
    """All batch elements at once, over the chunks that hold work for any."""
    operands, rules = problem.operands, problem.rules
    batch, kv_heads, group, q_len, _ = operands.query.shape
    schedule = Schedule(
        *(rules.visibility, operands.parameters),
        *(kv_heads, group, sizes.query, sizes.key),
    )
    # By position these are the caller's own arrays, of which XLA makes no copy.
    query = queries_by_position(operands.query, (batch,))
    query = pad_to(query, schedule.q_chunks * sizes.query, axis=1)
    key, value = (
        pad_to(keys_by_position(x), schedule.kv_chunks * sizes.key, axis=1)
        for x in (operands.key, operands.value)
    )

    def rows(q_chunk: Int[Array, ""]) -> SoftmaxState:
        plans = schedule.keys_for(q_chunk)

        def some_heads(head_start: Int[Array, ""]) -> SoftmaxState:
            def tile_at(kv_chunk: Int[Array, ""]) -> Tile:
                return Tile(
                    *(head_start, q_chunk * sizes.query, kv_chunk * sizes.key),
                    *(sizes.kv_heads, group, sizes.query, sizes.key),
                    Layout.KEYS_MINOR,
                )

            q = tile_at(jnp.int32(0)).queries(query)

            def visit(
                kv_chunk: Int[Array, ""], state: SoftmaxState, masked: bool
            ) -> SoftmaxState:
                tile = tile_at(kv_chunk)
                k, v = tile.keys(key), tile.keys(value)
                own = Operands(q, k, v, operands.parameters.cut(tile))
                own = own.with_scaled_query()
                allowed = rules.allowed(own.parameters, tile) if masked else None
                return attend_tile(state, own, rules, problem.dropout, tile, allowed)[0]

            state = no_keys((*q.shape[:-1], value.shape[-1]), operands.accumulator)
            plan = plans.of(head_start, sizes.kv_heads)
            return plan.walk(visit, vary_like(state, varying_axes(q)))

        head_starts = jnp.arange(0, kv_heads, sizes.kv_heads, dtype=jnp.int32)
        states = map_(some_heads, head_starts)
        return tree_map(lambda x: join_chunks(x, axis=1, length=kv_heads), states)

    states = map_(rows, jnp.arange(schedule.q_chunks, dtype=jnp.int32))
    return tree_map(lambda x: join_chunks(x, axis=3, length=q_len), states)
