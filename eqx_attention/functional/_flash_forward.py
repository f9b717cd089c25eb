"""The forward pass of flash attention: chunks of queries against chunks of keys.

The scheme is that of Dao et al. 2022 (arXiv 2205.14135) and Dao 2023 (2307.08691): for
one chunk of queries after the other, a running softmax over the chunks of keys that
hold work. Nothing that is kept grows faster than the length.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from .._config import ChunkSizes
from .._jax import map_, tree_map, vary_like, varying_axes
from ._batch import map_batch
from ._block import attend_tile, join_chunks, pad_to
from ._inputs import Operands, Problem
from ._online_softmax import SoftmaxState, no_keys
from ._schedule import Schedule
from ._tiles import Layout, Tile


def forward(problem: Problem, sizes: ChunkSizes) -> SoftmaxState:
    """The state of every query after all keys. `sizes` are at most the lengths.

    Where batch elements see other keys, one walks its chunks after the other.
    """
    if not problem.walks_apart(sizes):
        return _together(problem, sizes)

    def one(*element: PyTree) -> SoftmaxState:
        return _together(problem.element(*element), sizes)

    batch = problem.operands.query.shape[0]
    return map_batch(one, *problem.by_element, batch=batch)


def _together(problem: Problem, sizes: ChunkSizes) -> SoftmaxState:
    """All batch elements at once, over the chunks that hold work for any."""
    operands, rules = problem.operands, problem.rules
    q_len = operands.query.shape[3]
    schedule = Schedule(
        rules.visibility, operands.parameters.bias, q_len, sizes.query, sizes.key
    )
    query = pad_to(operands.query, schedule.q_chunks * sizes.query, axis=3)
    key = pad_to(operands.key, schedule.kv_chunks * sizes.key, axis=2)
    value = pad_to(operands.value, schedule.kv_chunks * sizes.key, axis=2)

    def rows(q_chunk: Int[Array, ""]) -> SoftmaxState:
        q_start = q_chunk * sizes.query
        q = lax.dynamic_slice_in_dim(query, q_start, sizes.query, axis=3)

        def visit(
            kv_chunk: Int[Array, ""], state: SoftmaxState, masked: bool
        ) -> SoftmaxState:
            kv_start = kv_chunk * sizes.key
            tile = Tile(q_start, kv_start, sizes.query, sizes.key, Layout.KEYS_MINOR)
            k = lax.dynamic_slice_in_dim(key, kv_start, sizes.key, axis=2)
            v = lax.dynamic_slice_in_dim(value, kv_start, sizes.key, axis=2)
            own = Operands(q, k, v, operands.parameters.cut(tile))
            allowed = rules.allowed(own.parameters, tile) if masked else None
            return attend_tile(state, own, rules, problem.dropout, tile, allowed)[0]

        state = no_keys((*q.shape[:-1], value.shape[-1]), operands.accumulator)
        state = vary_like(state, varying_axes(q))
        return schedule.keys_for(q_chunk).walk(visit, state)

    states = map_(rows, jnp.arange(schedule.q_chunks, dtype=jnp.int32))
    return tree_map(lambda x: join_chunks(x, axis=3, length=q_len), states)
