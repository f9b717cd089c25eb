r"""The backward pass of flash attention: every tile again, from the forward's maximum.

With the maximum m of a row fixed, its state is n = sum_j w_j v_j and l = sum_j w_j,
where w_j = exp(x_j - m). So the gradient of a logit is

$$\bar x_j = w_j (\bar n \cdot v_j + \bar l)$$

and needs nothing of the other tiles. (With dropout, the first term only for kept
weights.) Chunks of keys are the outer loop: the gradients of keys and values are
finished one chunk after the other, that of the queries is summed up in place.
"""

from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from .._jax import pad, positive_range, tree_map, vary_like, varying_axes, vjp
from ._batch import fold_batch
from ._block import join_chunks, pad_to
from ._layout import keys_by_position, queries_by_position
from ._logits import contract, drop_unseen
from ._online_softmax import SoftmaxState, exp_below
from ._problem import Operands, Problem
from ._schedule import Schedule
from ._score import AbstractScore, ScoreParameters
from ._tiles import Layout, Matrix, Tile, TileSizes, add_at, is_matrix, merge_rows


class Sums(eqx.Module):
    """Gradients to which every tile adds. The bias has its ends filled up to chunks."""

    query: Float[Array, "q_chunks batch kv_heads qk_dim group q_size"]
    parameters: ScoreParameters


class KeySums(eqx.Module):
    """Gradients of one chunk of keys and values."""

    key: Float[Array, "batch kv_heads kv_size qk_dim"]
    value: Float[Array, "batch kv_heads kv_size v_dim"]


Wanted: TypeAlias = ScoreParameters
"""True in the place of each parameter that needs a gradient."""


def backward(
    problem: Problem, sizes: TileSizes, wanted: Wanted, cotangent: SoftmaxState
) -> Operands:
    """The gradient of the operands; None for parameters that are not wanted.

    `cotangent` has the forward pass's maximum in the place of one for the maximum.
    """
    walk = _one_by_one if problem.walks_apart(sizes) else _together
    found = walk(problem, sizes, wanted, cotangent)
    given = eqx.filter(problem.operands.parameters, wanted)

    def cast(gradient: Array, x: Array) -> Array:
        return gradient.astype(x.dtype)

    parameters: ScoreParameters = jax.tree.map(cast, found.parameters, given)
    return Operands(found.query, found.key, found.value, parameters)


def _one_by_one(
    problem: Problem, sizes: TileSizes, wanted: Wanted, cotangent: SoftmaxState
) -> Operands:
    """One batch element after the other; gradients of what they share are summed up."""
    operands = problem.operands
    batch = operands.query.shape[0]
    parameters = eqx.filter(operands.parameters, wanted)

    def has_batch_axis(x: Array) -> bool:
        return x.ndim > 0 and x.shape[0] == batch

    is_own = jax.tree.map(has_batch_axis, parameters)

    def one(
        carry: ScoreParameters, cotangent: SoftmaxState, *element: PyTree
    ) -> tuple[ScoreParameters, tuple[Array, Array, Array, ScoreParameters]]:
        found = _together(problem.element(*element), sizes, wanted, cotangent)
        own, shared = eqx.partition(found.parameters, is_own)
        total: ScoreParameters = jax.tree.map(jnp.add, carry, shared)
        return total, (found.query, found.key, found.value, own)

    nothing = eqx.filter(parameters, is_own, inverse=True)
    nothing = tree_map(lambda x: jnp.zeros(x.shape, operands.accumulator), nothing)
    nothing = vary_like(nothing, varying_axes(operands.query))
    total, (query, key, value, own) = fold_batch(
        one, nothing, cotangent, *problem.by_element, batch=batch
    )
    return Operands(query, key, value, eqx.combine(total, own))


def _together(
    problem: Problem, sizes: TileSizes, wanted: Wanted, cotangent: SoftmaxState
) -> Operands:
    """All batch elements at once; the parameters' gradients are not yet cast."""
    operands, rules = problem.operands, problem.rules
    parameters, dtype = operands.parameters, operands.accumulator
    query_scale, max_logits = operands.query_scale, cotangent.max_logits
    if query_scale is not None:
        parameters = parameters.without_scale()
    batch, kv_heads, group, q_len, qk_dim = operands.query.shape
    kv_len = operands.key.shape[2]
    schedule = Schedule(
        *(rules.visibility, parameters), *(kv_heads, group, sizes.query, sizes.key)
    )
    padded_q = schedule.q_chunks * sizes.query
    padded_kv = schedule.kv_chunks * sizes.key

    # A row that has seen nothing has a reference that makes its weights 0.
    empty, far = max_logits == -jnp.inf, positive_range(rules.dtype)[1]
    reference = jnp.where(empty, jnp.full_like(max_logits, far), max_logits)
    reference = pad(reference, [(0, 0)] * 3 + [(0, padded_q - q_len)], fill=far)
    # Queries that see nothing may hold NaN, which must not come into the sums.
    query = jnp.where(empty[..., None], jnp.zeros_like(operands.query), operands.query)
    padded_query, d_numerator = (
        pad_to(queries_by_position(x, (batch,)), padded_q, axis=1)
        for x in (query, cotangent.numerator)
    )
    d_denominator = pad_to(cotangent.denominator, padded_q, axis=3)
    key, value = (
        pad_to(keys_by_position(x), padded_kv, axis=1)
        for x in (operands.key, operands.value)
    )

    def visit_tile(
        tile: Tile, k: Array, k_by_dim: Array, v: Array, masked: bool, key_sums: KeySums
    ) -> tuple[Array, ScoreParameters, KeySums]:
        """The tile's gradients of queries and parameters, and the keys' sums."""
        q, d_num = (tile.queries(x) for x in (padded_query, d_numerator))
        if query_scale is not None:
            q = q.astype(dtype) * query_scale
        d_den, shift = tile.numbers(d_denominator), tile.numbers(reference)
        tile_parameters = parameters.cut(tile)
        allowed = rules.allowed(tile_parameters, tile) if masked else None
        k, v = drop_unseen(k, allowed, tile), drop_unseen(v, allowed, tile)
        k_by_dim = drop_unseen(k_by_dim, allowed, tile, axis=3)
        free, fixed = eqx.partition(tile_parameters, wanted)

        def logits_of(products: Array, free: ScoreParameters) -> Array:
            full = eqx.combine(free, fixed)
            return rules.logits(products, full, tile, allowed)

        logits, pull = vjp(logits_of, rules.products(q, k, tile.layout), free)
        weights = exp_below(merge_rows(logits, 3), merge_rows(shift, 3))
        weights = weights.astype(dtype)
        q, d_num = merge_rows(q, 2), merge_rows(d_num, 2)
        k = k.reshape(*weights.shape[:-2], sizes.key, k.shape[-1])
        v = v.reshape(*weights.shape[:-2], sizes.key, v.shape[-1])
        d_weights = contract("...sd,...td->...st", v, d_num, rules.precision)
        kept = weights
        if problem.dropout is not None:
            kept, d_weights = (
                merge_rows(problem.dropout.apply(x.reshape(logits.shape), tile), 3)
                for x in (weights, d_weights)
            )
        d_logits = weights * (d_weights + merge_rows(d_den, 3))
        d_logits = d_logits.astype(logits.dtype).reshape(logits.shape)
        d_products, d_free = pull(d_logits)
        d_products = merge_rows(d_products, 3)
        d_value = contract("...st,...td->...sd", kept, d_num, rules.precision)
        d_key = contract("...st,...td->...sd", d_products, q, rules.precision)
        k_by_dim = k_by_dim.reshape(*weights.shape[:-2], qk_dim, sizes.key)
        d_query = contract("...ds,...st->...dt", k_by_dim, d_products, rules.precision)
        key_sums = KeySums(
            key_sums.key + d_key.reshape(key_sums.key.shape),
            key_sums.value + d_value.reshape(key_sums.value.shape),
        )
        d_query = d_query.reshape(batch, sizes.kv_heads, qk_dim, group, sizes.query)
        return d_query, d_free, key_sums

    def column(sums: Sums, kv_chunk: Int[Array, ""]) -> tuple[Sums, KeySums]:
        plans = schedule.queries_for(kv_chunk)

        def some_heads(sums: Sums, head_start: Int[Array, ""]) -> tuple[Sums, KeySums]:
            def tile_at(q_chunk: Int[Array, ""]) -> Tile:
                return Tile(
                    *(head_start, q_chunk * sizes.query, kv_chunk * sizes.key),
                    *(sizes.kv_heads, group, sizes.query, sizes.key),
                    Layout.QUERIES_MINOR,
                )

            first = tile_at(jnp.int32(0))
            k, v = first.keys(key), first.keys(value)
            # Transposed here once: in the loop XLA makes a slow product of it.
            k_by_dim = jnp.swapaxes(k, 2, 3)

            def visit(
                q_chunk: Int[Array, ""], carry: tuple[Sums, KeySums], masked: bool
            ) -> tuple[Sums, KeySums]:
                sums, key_sums = carry
                tile = tile_at(q_chunk)
                d_query, d_parameters, key_sums = visit_tile(
                    tile, k, k_by_dim, v, masked, key_sums
                )
                return _add(sums, q_chunk, tile, d_query, d_parameters), key_sums

            nothing = KeySums(jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
            nothing = vary_like(nothing, varying_axes(k))
            plan = plans.of(head_start, sizes.kv_heads)
            sums, key_sums = plan.walk(visit, (sums, nothing))
            return sums, KeySums(
                key_sums.key.astype(key.dtype), key_sums.value.astype(value.dtype)
            )

        head_starts = jnp.arange(0, kv_heads, sizes.kv_heads, dtype=jnp.int32)
        sums, key_sums = lax.scan(some_heads, sums, head_starts)
        return sums, tree_map(
            lambda x: join_chunks(x, axis=1, length=kv_heads), key_sums
        )

    def nothing_for(x: Array | Matrix) -> Array | Matrix:
        if isinstance(x, Matrix):
            return x.zeros(padded_q, padded_kv, dtype)
        return jnp.zeros(x.shape, dtype)

    sums = Sums(
        jnp.zeros(
            (schedule.q_chunks, batch, kv_heads, qk_dim, group, sizes.query), dtype
        ),
        jax.tree.map(nothing_for, eqx.filter(parameters, wanted), is_leaf=is_matrix),
    )
    sums, key_sums = lax.scan(
        column,
        vary_like(sums, varying_axes(query)),
        jnp.arange(schedule.kv_chunks, dtype=jnp.int32),
    )
    d_query = join_chunks(jnp.moveaxis(sums.query, 3, 5), axis=3, length=q_len)
    d_scale = sums.parameters.scale
    if query_scale is not None:
        if wanted.scale:
            d_scale = jnp.sum(d_query * query)
        d_query = d_query * query_scale

    def trimmed(total: Array | Matrix, x: Array | Matrix) -> Array | Matrix:
        if isinstance(total, Matrix) and isinstance(x, Matrix):
            return total.trimmed(x)
        return total

    d_score: AbstractScore | None = jax.tree.map(
        trimmed,
        *(sums.parameters.score, eqx.filter(parameters, wanted).score),
        is_leaf=is_matrix,
    )
    return Operands(
        d_query.astype(query.dtype),
        join_chunks(key_sums.key, axis=2, length=kv_len),
        join_chunks(key_sums.value, axis=2, length=kv_len),
        ScoreParameters(d_scale, d_score),
    )


def _add(
    sums: Sums,
    q_chunk: Int[Array, ""],
    tile: Tile,
    d_query: Float[Array, "batch kv_heads qk_dim group q_size"],
    d_parameters: ScoreParameters,
) -> Sums:
    """The sums with one tile's part."""
    zero = jnp.int32(0)
    start = (q_chunk, zero, tile.head_start, zero, zero, zero)

    def plus(total: Array | Matrix, part: Array | Matrix) -> Array | Matrix:
        if isinstance(total, Matrix):
            return total.add(part, tile) if isinstance(part, Matrix) else total
        return total if isinstance(part, Matrix) else total + part.astype(total.dtype)

    parameters: ScoreParameters = jax.tree.map(
        plus, sums.parameters, d_parameters, is_leaf=is_matrix
    )
    return Sums(add_at(sums.query, d_query[None], start), parameters)
