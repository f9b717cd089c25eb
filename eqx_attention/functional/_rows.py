"""Chunks of queries, each against the chunks of keys that hold work for it.

The walk that all passes by queries have in common; what they do in a tile is their own.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._jax import map_, tree_map, vary_like, varying_axes
from ._batch import map_batch
from ._block import join_chunks, pad_to
from ._layout import keys_by_position, queries_by_position
from ._problem import Operands, Problem
from ._schedule import Plan, Schedule
from ._score import AbstractScore, ScoreParameters
from ._tiles import Layout, Tile, TileSizes

_Carry = TypeVar("_Carry")
_Out = TypeVar("_Out")


class Beside(eqx.Module):
    """Arrays that go with the operands, and are cut as these are.

    `queries` are laid out as the queries, `keys` as keys and values; `numbers` have one
    for each row, and axes of 1 broadcast; `parameters` go with those of the score.
    """

    queries: tuple[Float[Array, "batch kv_heads group q_len _"], ...] = ()
    keys: tuple[Float[Array, "batch kv_heads kv_len _"], ...] = ()
    numbers: tuple[Float[Array, "_ kv_heads group _"], ...] = ()
    parameters: ScoreParameters | None = None


class Cut(eqx.Module):
    """What belongs to a tile. `allowed` is None if all its pairs have a weight."""

    tile: Tile
    operands: Operands
    beside: Beside
    allowed: Bool[Array, "..."] | None


@dataclasses.dataclass(frozen=True)
class Rows:
    """A chunk of queries of some heads, to be folded over the keys."""

    query: Float[Array, "batch kv_heads group q_size qk_dim"]
    beside: Beside
    plan: Plan
    kv_chunks: int
    cut: Callable[[Int[Array, ""], bool], Cut]

    def fold(self, step: Callable[[_Carry, Cut], _Carry], carry: _Carry) -> _Carry:
        """`step(carry, cut)` of one tile with work after the other."""

        def visit(kv_chunk: Int[Array, ""], carry: _Carry, masked: bool) -> _Carry:
            return step(carry, self.cut(kv_chunk, masked))

        return self.plan.walk(visit, vary_like(carry, varying_axes(self.query)))


def by_rows(
    function: Callable[[Problem, Rows], _Out],
    problem: Problem,
    sizes: TileSizes,
    beside: Beside | None = None,
) -> _Out:
    """`function(problem, rows)` of each chunk of queries, put together again.

    `problem` is that of the batch elements at hand. What comes back has the axes `batch
    kv_heads group q_size` in front. `sizes` are at most the lengths.
    """
    beside = Beside() if beside is None else beside
    if not problem.walks_apart(sizes):
        return _together(function, problem, sizes, beside)
    parameters = beside.parameters
    score = None if parameters is None else parameters.score

    def one(
        queries: PyTree,
        keys: PyTree,
        numbers: PyTree,
        score: AbstractScore | None,
        *element: PyTree,
    ) -> _Out:
        own = None if parameters is None else ScoreParameters(parameters.scale, score)
        own_beside = Beside(queries, keys, numbers, own)
        return _together(function, problem.element(*element), sizes, own_beside)

    return map_batch(
        one,
        *(beside.queries, beside.keys, beside.numbers, score),
        *problem.by_element,
        batch=problem.operands.query.shape[0],
    )


def _together(
    function: Callable[[Problem, Rows], _Out],
    problem: Problem,
    sizes: TileSizes,
    beside: Beside,
) -> _Out:
    """All batch elements at once, over the chunks that hold work for any."""
    operands, rules = problem.operands, problem.rules
    batch, kv_heads, group, q_len, _ = operands.query.shape
    schedule = Schedule(
        *(rules.visibility, operands.parameters),
        *(kv_heads, group, sizes.query, sizes.key),
    )

    # By position these are the caller's own arrays, of which XLA makes no copy.
    def queries(x: Array) -> Array:
        x = queries_by_position(x, (batch,))
        return pad_to(x, schedule.q_chunks * sizes.query, axis=1)

    def keys(x: Array) -> Array:
        return pad_to(keys_by_position(x), schedule.kv_chunks * sizes.key, axis=1)

    query, more_queries = queries(operands.query), tree_map(queries, beside.queries)
    key, value = keys(operands.key), keys(operands.value)
    more_keys = tree_map(keys, beside.keys)

    def rows(q_chunk: Int[Array, ""]) -> _Out:
        plans = schedule.keys_for(q_chunk)

        def some_heads(head_start: Int[Array, ""]) -> _Out:
            def tile_at(kv_chunk: Int[Array, ""]) -> Tile:
                return Tile(
                    *(head_start, q_chunk * sizes.query, kv_chunk * sizes.key),
                    *(sizes.kv_heads, group, sizes.query, sizes.key),
                    Layout.KEYS_MINOR,
                )

            first = tile_at(jnp.int32(0))
            own_query = first.queries(query)
            own_beside = Beside(
                queries=tree_map(first.queries, more_queries),
                numbers=tree_map(lambda x: first.numbers(x)[..., 0], beside.numbers),
            )

            def cut(kv_chunk: Int[Array, ""], masked: bool) -> Cut:
                tile = tile_at(kv_chunk)
                own = Operands(
                    own_query,
                    tile.keys(key),
                    tile.keys(value),
                    operands.parameters.cut(tile),
                )
                parameters = beside.parameters
                return Cut(
                    tile,
                    own,
                    Beside(
                        own_beside.queries,
                        tree_map(tile.keys, more_keys),
                        own_beside.numbers,
                        None if parameters is None else parameters.cut(tile),
                    ),
                    rules.allowed(own.parameters, tile) if masked else None,
                )

            plan = plans.of(head_start, sizes.kv_heads)
            return function(
                problem, Rows(own_query, own_beside, plan, schedule.kv_chunks, cut)
            )

        head_starts = jnp.arange(0, kv_heads, sizes.kv_heads, dtype=jnp.int32)
        outs = map_(some_heads, head_starts)
        return tree_map(lambda x: join_chunks(x, axis=1, length=kv_heads), outs)

    outs = map_(rows, jnp.arange(schedule.q_chunks, dtype=jnp.int32))
    return tree_map(lambda x: join_chunks(x, axis=3, length=q_len), outs)
