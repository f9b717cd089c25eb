"""Attention with entmax by chunks, in memory that grows with the length.

For one chunk of queries after the other: a pass over the keys for the highest logit of
each chunk of them; one for each step of the search for the threshold; and one that sums
up values. Chunks in which nothing is above the threshold are skipped in all but the
first: their weights are 0, and nothing of them is computed. (Gonçalves et al. 2025,
AdaSplash, arXiv 2502.12082, do the same on a GPU.)

Derivatives, in both modes and of any order, are those of whole rows, 128 at a time.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._config import ChunkSizes
from .._jax import cond, vary_together
from .._normalizer import Entmax
from .._primitive import array_type, bind, create_primitive, no_transpose
from ._block import map_rows, whole
from ._dropout import Dropout
from ._entmax import LOWEST, Heights, Sums, search
from ._entmax_standard import alphas, entmax_block, entmax_output
from ._inputs import Inputs
from ._logits import LogitRules, contract, drop_unseen
from ._online_softmax import finite
from ._problem import Operands, Problem
from ._rows import Beside, Cut, Rows, by_rows
from ._tiles import TileSizes, merge_rows


@eqx.filter_jit
def entmax_flash(
    inputs: Inputs, normalizer: Entmax, chunk_sizes: ChunkSizes
) -> Float[Array, "..."]:
    """The output."""
    problem = inputs.problem()
    alpha = alphas(inputs, normalizer)
    if problem.is_empty:
        return entmax_output(inputs, entmax_block(problem, alpha, whole(problem))[0])
    sizes = problem.tile_sizes(chunk_sizes)
    problem, alpha = vary_together((problem, alpha))
    out = bind(_attend, problem.operands, alpha, problem.rules, problem.dropout, sizes)
    return entmax_output(inputs, out)


def _attend_of(
    operands: Operands,
    alpha: Float[Array, "1 kv_heads group 1"],
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
) -> Float[Array, "batch kv_heads group q_len v_dim"]:
    problem = Problem(operands, rules, dropout)
    return by_rows(_attend_rows, problem, sizes, Beside(numbers=(alpha,)))


def _attend_type(operands: Any, alpha: Any, *others: PyTree) -> Any:
    del others
    query, v_dim = operands.query, operands.value.shape[-1]
    return array_type(query, (*query.shape[:-1], v_dim), alpha.dtype)


def _attend_jvp(primals: Any, tangents: Any) -> tuple[PyTree, PyTree]:
    operands, alpha, rules, dropout, _ = primals

    def plain(operands: Operands, alpha: Array) -> Array:
        problem = Problem(operands, rules, dropout)
        return map_rows(problem, lambda part, tile: entmax_block(part, alpha, tile)[0])

    out = bind(_attend, *primals)
    return out, eqx.filter_jvp(plain, (operands, alpha), tangents[:2])[1]


_attend = create_primitive(
    "flash_entmax", _attend_of, _attend_type, _attend_jvp, no_transpose
)


def _attend_rows(
    problem: Problem, rows: Rows
) -> Float[Array, "batch kv_heads group q_size v_dim"]:
    (alpha,) = rows.beside.numbers
    shape, dtype = rows.query.shape[:-1], problem.operands.accumulator
    low = jnp.full((rows.kv_chunks, *shape), -jnp.inf, dtype)

    def highest(tops: Array, cut: Cut) -> Array:
        top = jnp.max(_logits(problem, cut), axis=-1).astype(dtype)
        return tops.at[_chunk(cut)].set(top)

    tops = rows.fold(highest, low)
    max_logits = jnp.max(tops, axis=0)
    peak = finite(max_logits)
    tops = Heights.of(jnp.moveaxis(tops, 0, -1), peak, alpha).z

    def above(tau: Array, cut: Cut) -> Array:
        """Whether a row of the tile has anything above its threshold."""
        top = jnp.take(tops, _chunk(cut), axis=-1)
        return jnp.any(top > tau)

    def heights(cut: Cut) -> Heights:
        return Heights.of(_logits(problem, cut), peak, alpha)

    def sums(tau: Array) -> Sums:
        def add(total: Sums, cut: Cut) -> Sums:
            def some() -> Sums:
                part = heights(cut).sums(tau)
                return Sums(total.weights + part.weights, total.slopes + part.slopes)

            return cond(above(tau, cut), some, lambda: total)

        zeros = jnp.zeros(shape, dtype)
        return rows.fold(add, Sums(zeros, zeros))

    tau = search(sums, alpha, jnp.full_like(peak, LOWEST))

    def attend(carry: tuple[Array, Array], cut: Cut) -> tuple[Array, Array]:
        def some() -> tuple[Array, Array]:
            numerator, mass = carry
            weights = heights(cut).weights(tau)
            return (
                numerator + _sum_of_values(problem, cut, weights),
                mass + jnp.sum(weights, axis=-1),
            )

        return cond(above(tau, cut), some, lambda: carry)

    v_dim = problem.operands.value.shape[-1]
    nothing = jnp.zeros((*shape, v_dim), dtype), jnp.zeros(shape, dtype)
    numerator, mass = rows.fold(attend, nothing)
    return numerator / jnp.where(mass == 0, jnp.ones_like(mass), mass)[..., None]


def _chunk(cut: Cut) -> Array:
    """The number of the tile's chunk of keys."""
    return cut.tile.kv_start // cut.tile.kv_size


def _logits(
    problem: Problem, cut: Cut
) -> Float[Array, "batch kv_heads group q_size kv_size"]:
    own = cut.operands.with_scaled_query()
    products = problem.rules.products(own.query, own.key, cut.tile.layout)
    return problem.rules.logits(products, own.parameters, cut.tile, cut.allowed)


def _sum_of_values(
    problem: Problem, cut: Cut, weights: Float[Array, "..."]
) -> Float[Array, "batch kv_heads group q_size v_dim"]:
    """The sum of the tile's values, by the weights that dropout keeps."""
    if problem.dropout is not None:
        weights = problem.dropout.apply(weights, cut.tile)
    value = drop_unseen(cut.operands.value, cut.allowed, cut.tile)
    merged = merge_rows(weights, 2)
    value = value.reshape(*merged.shape[:-2], *value.shape[-2:])
    total = contract("...ts,...sd->...td", merged, value, problem.rules.precision)
    return total.reshape(*weights.shape[:-1], value.shape[-1])
