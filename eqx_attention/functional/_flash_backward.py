r"""The backward pass of flash attention: every tile again, from the forward's maximum.

With the maximum m of a row fixed, its state is n = sum_j w_j v_j and l = sum_j w_j,
where w_j = exp(x_j - m). So the gradient of a logit is

$$\bar x_j = w_j (\bar n \cdot v_j + \bar l)$$

and needs nothing of the other tiles. (With dropout, the first term only for kept
weights.) Chunks of keys are the outer loop: the gradients of keys and values are
finished one chunk after the other, that of the queries is summed up in place.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from .._jax import pad, positive_range, tree_map, vary_like, varying_axes, vjp
from ._batch import fold_batch
from ._block import join_chunks, pad_to
from ._layout import keys_by_position, queries_by_position
from ._logits import ScoreParameters, contract, drop_unseen
from ._online_softmax import SoftmaxState, exp_below
from ._problem import Operands, Problem
from ._schedule import Schedule
from ._tiles import Layout, Tile, TileSizes, merge_rows


class Sums(eqx.Module):
    """Gradients to which every tile adds. The bias has its ends filled up to chunks."""

    query: Float[Array, "q_chunks batch kv_heads qk_dim group q_size"]
    parameters: ScoreParameters


class KeySums(eqx.Module):
    """Gradients of one chunk of keys and values."""

    key: Float[Array, "batch kv_heads kv_size qk_dim"]
    value: Float[Array, "batch kv_heads kv_size v_dim"]


class Wanted(eqx.Module):
    """Which of the score's parameters need a gradient."""

    scale: bool = eqx.field(static=True)
    bias: bool = eqx.field(static=True)
    sink_bias: bool = eqx.field(static=True)

    def of(self, parameters: ScoreParameters) -> ScoreParameters:
        """The parameters that need one, None in place of the others."""
        return ScoreParameters(
            parameters.scale if self.scale else None,
            parameters.bias if self.bias else None,
            parameters.sink_bias if self.sink_bias else None,
        )


def backward(
    problem: Problem, sizes: TileSizes, wanted: Wanted, cotangent: SoftmaxState
) -> Operands:
    """The gradient of the operands; None for parameters that are not wanted.

    `cotangent` has the forward pass's maximum in the place of one for the maximum.
    """
    walk = _one_by_one if problem.walks_apart(sizes) else _together
    found = walk(problem, sizes, wanted, cotangent)
    ours, given = found.parameters, problem.operands.parameters
    return Operands(
        found.query,
        found.key,
        found.value,
        ScoreParameters(
            _cast(ours.scale, given.scale),
            _cast(ours.bias, given.bias),
            _cast(ours.sink_bias, given.sink_bias),
        ),
    )


def _one_by_one(
    problem: Problem, sizes: TileSizes, wanted: Wanted, cotangent: SoftmaxState
) -> Operands:
    """One batch element after the other; gradients of what they share are summed up."""
    operands = problem.operands
    batch, bias = operands.query.shape[0], operands.parameters.bias
    shares_bias = bias is not None and bias.shape[0] != batch

    def one(
        carry: ScoreParameters, cotangent: SoftmaxState, *element: PyTree
    ) -> tuple[ScoreParameters, tuple[Array, Array, Array, Array | None]]:
        found = _together(problem.element(*element), sizes, wanted, cotangent)
        shared, own_bias = found.parameters, None
        if not shares_bias:
            own_bias = shared.bias
            shared = ScoreParameters(shared.scale, None, shared.sink_bias)
        total: ScoreParameters = jax.tree.map(jnp.add, carry, shared)
        return total, (found.query, found.key, found.value, own_bias)

    nothing = wanted.of(operands.parameters)
    if not shares_bias:
        nothing = ScoreParameters(nothing.scale, None, nothing.sink_bias)
    nothing = tree_map(lambda x: jnp.zeros(x.shape, operands.accumulator), nothing)
    nothing = vary_like(nothing, varying_axes(operands.query))
    total, (query, key, value, own_bias) = fold_batch(
        one, nothing, cotangent, *problem.by_element, batch=batch
    )
    bias = total.bias if shares_bias else own_bias
    return Operands(
        query, key, value, ScoreParameters(total.scale, bias, total.sink_bias)
    )


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
        rules.visibility, parameters.bias, q_len, sizes.query, sizes.key
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
        q, d_num = (tile.queries(x, group) for x in (padded_query, d_numerator))
        if query_scale is not None:
            q = q.astype(dtype) * query_scale
        d_den, shift = tile.numbers(d_denominator), tile.numbers(reference)
        tile_parameters = parameters.cut(tile)
        allowed = rules.allowed(tile_parameters, tile) if masked else None
        k, v = drop_unseen(k, allowed, tile), drop_unseen(v, allowed, tile)
        k_by_dim = drop_unseen(k_by_dim, allowed, tile, axis=3)
        free = wanted.of(tile_parameters)

        def logits_of(products: Array, free: ScoreParameters) -> Array:
            full = eqx.combine(free, tile_parameters)
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
        plan = schedule.queries_for(kv_chunk)

        def some_heads(sums: Sums, head_start: Int[Array, ""]) -> tuple[Sums, KeySums]:
            def tile_at(q_chunk: Int[Array, ""]) -> Tile:
                return Tile(
                    *(head_start, q_chunk * sizes.query, kv_chunk * sizes.key),
                    *(sizes.kv_heads, sizes.query, sizes.key),
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
            sums, key_sums = plan.walk(visit, (sums, nothing))
            return sums, KeySums(
                key_sums.key.astype(key.dtype), key_sums.value.astype(value.dtype)
            )

        head_starts = jnp.arange(0, kv_heads, sizes.kv_heads, dtype=jnp.int32)
        sums, key_sums = lax.scan(some_heads, sums, head_starts)
        return sums, tree_map(
            lambda x: join_chunks(x, axis=1, length=kv_heads), key_sums
        )

    sums = Sums(
        jnp.zeros(
            (schedule.q_chunks, batch, kv_heads, qk_dim, group, sizes.query), dtype
        ),
        tree_map(
            lambda x: jnp.zeros(_whole_chunks(x.shape, padded_q, padded_kv), dtype),
            wanted.of(parameters),
        ),
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
    return Operands(
        d_query.astype(query.dtype),
        join_chunks(key_sums.key, axis=2, length=kv_len),
        join_chunks(key_sums.value, axis=2, length=kv_len),
        ScoreParameters(
            d_scale,
            _like(sums.parameters.bias, parameters.bias),
            sums.parameters.sink_bias,
        ),
    )


def _cast(gradient: Array | None, x: Array | None) -> Array | None:
    """A gradient in the dtype of what it is one of."""
    return None if gradient is None or x is None else gradient.astype(x.dtype)


def _like(total: Array | None, x: Array | None) -> Array | None:
    """A parameter's sum as its gradient: without the filled up ends."""
    if total is None or x is None:
        return None
    return lax.slice(total, (0,) * x.ndim, x.shape)


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
    query = _add_at(sums.query, d_query[None], start)
    total, part = sums.parameters, d_parameters
    scale, bias, sink_bias = total.scale, total.bias, total.sink_bias
    if scale is not None and part.scale is not None:
        scale = scale + part.scale.astype(scale.dtype)
    if sink_bias is not None and part.sink_bias is not None:
        sink_bias = _add_at(sink_bias, part.sink_bias, (tile.head_start, zero, zero))
    if bias is not None and part.bias is not None:
        start = (zero, tile.head_start, zero, tile.q_start, tile.kv_start)
        bias = _add_at(bias, part.bias, start)
    return Sums(query, ScoreParameters(scale, bias, sink_bias))


def _add_at(
    total: Float[Array, "..."],
    part: Float[Array, "..."],
    start: tuple[Int[Array, ""], ...],
) -> Float[Array, "..."]:
    """`total` with `part` added from `start` on. Axes of 1 start at 0, by clamping."""
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part.astype(total.dtype), start)


def _whole_chunks(
    shape: tuple[int, ...], padded_q: int, padded_kv: int
) -> tuple[int, ...]:
    """The shape of a parameter's sum: a matrix has its ends filled up."""
    if len(shape) != 5:
        return shape
    *heads, q_len, kv_len = shape
    return (
        *heads,
        padded_q if q_len > 1 else 1,
        padded_kv if kv_len > 1 else 1,
    )
