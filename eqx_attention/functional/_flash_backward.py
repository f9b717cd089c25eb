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

from .._config import ChunkSizes
from .._jax import pad, positive_range, tree_map, vary_like, varying_axes, vjp
from ._batch import fold_batch
from ._block import join_chunks, pad_to
from ._inputs import Operands, Problem
from ._logits import ScoreParameters, contract, drop_unseen
from ._online_softmax import SoftmaxState, exp_below
from ._schedule import Schedule
from ._tiles import Layout, Tile


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
    problem: Problem, sizes: ChunkSizes, wanted: Wanted, cotangent: SoftmaxState
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
    problem: Problem, sizes: ChunkSizes, wanted: Wanted, cotangent: SoftmaxState
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
    problem: Problem, sizes: ChunkSizes, wanted: Wanted, cotangent: SoftmaxState
) -> Operands:
    """All batch elements at once; the parameters' gradients are not yet cast."""
    operands, rules = problem.operands, problem.rules
    parameters, dtype = operands.parameters, operands.accumulator
    q_len, kv_len = operands.query.shape[3], operands.key.shape[2]
    max_logits = cotangent.max_logits
    schedule = Schedule(
        rules.visibility, parameters.bias, q_len, sizes.query, sizes.key
    )
    padded_q = schedule.q_chunks * sizes.query
    padded_kv = schedule.kv_chunks * sizes.key

    # A row that has seen nothing has a reference that makes its weights 0.
    empty, far = max_logits == -jnp.inf, positive_range(rules.dtype)[1]
    reference = jnp.where(empty, jnp.full_like(max_logits, far), max_logits)
    reference = pad(reference, [(0, 0)] * 3 + [(0, padded_q - q_len)], fill=far)
    query = jnp.where(empty[..., None], jnp.zeros_like(operands.query), operands.query)
    query = pad_to(query, padded_q, axis=3)
    d_numerator = pad_to(cotangent.numerator, padded_q, axis=3)
    d_denominator = pad_to(cotangent.denominator, padded_q, axis=3)
    key = pad_to(operands.key, padded_kv, axis=2)
    value = pad_to(operands.value, padded_kv, axis=2)

    def visit_tile(
        tile: Tile, k: Array, v: Array, masked: bool, key_sums: KeySums
    ) -> tuple[Array, ScoreParameters, KeySums]:
        """The tile's gradients of queries and parameters, and the keys' sums."""
        q = lax.dynamic_slice_in_dim(query, tile.q_start, tile.q_size, axis=3)
        d_num = lax.dynamic_slice_in_dim(d_numerator, tile.q_start, tile.q_size, axis=3)
        d_den = lax.dynamic_slice_in_dim(
            d_denominator, tile.q_start, tile.q_size, axis=3
        )
        shift = lax.dynamic_slice_in_dim(reference, tile.q_start, tile.q_size, axis=3)
        tile_parameters = parameters.cut(tile)
        allowed = rules.allowed(tile_parameters, tile) if masked else None
        k, v = drop_unseen(k, allowed, tile), drop_unseen(v, allowed, tile)
        free = wanted.of(tile_parameters)

        def logits_of(products: Array, free: ScoreParameters) -> Array:
            full = eqx.combine(free, tile_parameters)
            return rules.logits(products, full, tile, allowed)

        logits, pull = vjp(logits_of, rules.products(q, k, tile.layout), free)
        weights = exp_below(logits, tile.rows(shift)).astype(dtype)
        d_weights = contract("bksd,bkgqd->bksgq", v, d_num, rules.precision)
        kept = weights
        if problem.dropout is not None:
            kept = problem.dropout.apply(weights, tile)
            d_weights = problem.dropout.apply(d_weights, tile)
        d_logits = weights * (d_weights + tile.rows(d_den))
        d_products, d_free = pull(d_logits.astype(logits.dtype))
        d_value = contract("bksgq,bkgqd->bksd", kept, d_num, rules.precision)
        d_key = contract("bksgq,bkgqd->bksd", d_products, q, rules.precision)
        d_query = contract("bksd,bksgq->bkdgq", k, d_products, rules.precision)
        return d_query, d_free, KeySums(key_sums.key + d_key, key_sums.value + d_value)

    def column(sums: Sums, kv_chunk: Int[Array, ""]) -> tuple[Sums, KeySums]:
        kv_start = kv_chunk * sizes.key
        k = lax.dynamic_slice_in_dim(key, kv_start, sizes.key, axis=2)
        v = lax.dynamic_slice_in_dim(value, kv_start, sizes.key, axis=2)

        def visit(
            q_chunk: Int[Array, ""], carry: tuple[Sums, KeySums], masked: bool
        ) -> tuple[Sums, KeySums]:
            sums, key_sums = carry
            q_start = q_chunk * sizes.query
            tile = Tile(q_start, kv_start, sizes.query, sizes.key, Layout.QUERIES_MINOR)
            d_query, d_parameters, key_sums = visit_tile(tile, k, v, masked, key_sums)
            return _add(sums, q_chunk, tile, d_query, d_parameters), key_sums

        nothing = KeySums(jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
        nothing = vary_like(nothing, varying_axes(k))
        sums, key_sums = schedule.queries_for(kv_chunk).walk(visit, (sums, nothing))
        return sums, KeySums(
            key_sums.key.astype(key.dtype), key_sums.value.astype(value.dtype)
        )

    batch, kv_heads, group, _, qk_dim = query.shape
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
    return Operands(
        d_query.astype(query.dtype),
        join_chunks(key_sums.key, axis=2, length=kv_len),
        join_chunks(key_sums.value, axis=2, length=kv_len),
        ScoreParameters(
            *(
                _like(total, x)
                for total, x in (
                    (sums.parameters.scale, parameters.scale),
                    (sums.parameters.bias, parameters.bias),
                    (sums.parameters.sink_bias, parameters.sink_bias),
                )
            )
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
    old = lax.dynamic_slice_in_dim(sums.query, q_chunk, 1, axis=0)
    query = lax.dynamic_update_slice_in_dim(
        sums.query, old + d_query[None], q_chunk, axis=0
    )
    total, part = sums.parameters, d_parameters
    scale, bias, sink_bias = total.scale, total.bias, total.sink_bias
    if scale is not None and part.scale is not None:
        scale = scale + part.scale.astype(scale.dtype)
    if sink_bias is not None and part.sink_bias is not None:
        sink_bias = sink_bias + part.sink_bias.astype(sink_bias.dtype)
    if bias is not None and part.bias is not None:
        zero = jnp.int32(0)
        start = (
            zero,
            zero,
            zero,
            tile.q_start if bias.shape[3] > 1 else zero,
            tile.kv_start if bias.shape[4] > 1 else zero,
        )
        old = lax.dynamic_slice(bias, start, part.bias.shape)
        bias = lax.dynamic_update_slice(bias, old + part.bias.astype(bias.dtype), start)
    return Sums(query, ScoreParameters(scale, bias, sink_bias))


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
