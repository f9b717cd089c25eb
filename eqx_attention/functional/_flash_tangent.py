r"""The tangent pass of flash attention: every tile again, from the forward's maximum.

With the maximum m of a row fixed, its state is n = sum_j w_j v_j and l = sum_j w_j,
where w_j = exp(x_j - m). So along a direction in which logits and values change by
$\dot x_j$ and $\dot v_j$ it changes by

$$\dot n = \sum_j w_j (\dot x_j v_j + \dot v_j), \qquad \dot l = \sum_j w_j \dot x_j$$

and, as in the backward pass, tiles need nothing of each other.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._jax import positive_range
from ._logits import contract, drop_unseen
from ._online_softmax import exp_below
from ._problem import Operands, Problem
from ._rows import Beside, Cut, Rows, by_rows
from ._score import ScoreParameters
from ._tiles import TileSizes, merge_rows


class Tangent(eqx.Module):
    """A direction in which operands change; None for what does not."""

    query: Float[Array, "batch kv_heads group q_len qk_dim"] | None
    key: Float[Array, "batch kv_heads kv_len qk_dim"] | None
    value: Float[Array, "batch kv_heads kv_len v_dim"] | None
    parameters: ScoreParameters


class StateTangent(eqx.Module):
    """How a state changes, with its maximum as a fixed point of reference."""

    numerator: Float[Array, "*rows v_dim"]
    denominator: Float[Array, "*rows"]


def tangent(
    problem: Problem,
    direction: Tangent,
    max_logits: Float[Array, "batch kv_heads group q_len"],
    sizes: TileSizes,
) -> StateTangent:
    """The change of the state of every query. It is linear in `direction`."""
    # A row that has seen nothing has a reference that makes its weights 0.
    far = jnp.full_like(max_logits, positive_range(problem.rules.dtype)[1])
    reference = jnp.where(max_logits == -jnp.inf, far, max_logits)
    beside = Beside(
        queries=_given(direction.query),
        keys=_given(direction.key) + _given(direction.value),
        numbers=(reference,),
        parameters=direction.parameters,
    )
    has_key, has_value = direction.key is not None, direction.value is not None

    def of_rows(problem: Problem, rows: Rows) -> StateTangent:
        (reference,) = rows.beside.numbers

        def step(total: StateTangent, cut: Cut) -> StateTangent:
            d_keys = [drop_unseen(x, cut.allowed, cut.tile) for x in cut.beside.keys]
            d_query = cut.beside.queries[0] if cut.beside.queries else None
            d_key = d_keys[0] if has_key else None
            d_value = d_keys[-1] if has_value else None
            own = Tangent(d_query, d_key, d_value, _known(cut.beside.parameters))
            part = _of_tile(problem, cut, reference, own)
            return StateTangent(
                total.numerator + part.numerator, total.denominator + part.denominator
            )

        shape = rows.query.shape[:-1]
        dtype, v_dim = problem.operands.accumulator, problem.operands.value.shape[-1]
        nothing = StateTangent(
            jnp.zeros((*shape, v_dim), dtype), jnp.zeros(shape, dtype)
        )
        return rows.fold(step, nothing)

    return by_rows(of_rows, problem, sizes, beside)


def _of_tile(
    problem: Problem,
    cut: Cut,
    reference: Float[Array, "batch kv_heads group q_size"],
    direction: Tangent,
) -> StateTangent:
    """What one tile adds."""
    rules, tile, own = problem.rules, cut.tile, cut.operands
    value = drop_unseen(own.value, cut.allowed, tile)

    def logits_of(query: Array, key: Array, parameters: ScoreParameters) -> Array:
        scaled = Operands(query, key, value, parameters).with_scaled_query()
        products = rules.products(scaled.query, scaled.key, tile.layout)
        return rules.logits(products, scaled.parameters, tile, cut.allowed)

    logits, d_logits = eqx.filter_jvp(
        logits_of,
        (own.query, drop_unseen(own.key, cut.allowed, tile), own.parameters),
        (direction.query, direction.key, direction.parameters),
    )
    rows = logits.shape[:-1]
    weights = exp_below(merge_rows(logits, 2), merge_rows(reference[..., None], 2))
    weights = weights.astype(reference.dtype)

    def sum_of(weights: Array, value: Array) -> Array:
        """The weighted sum of values, of the weights that dropout keeps."""
        if problem.dropout is not None:
            kept = problem.dropout.apply(weights.reshape(logits.shape), tile)
            weights = kept.reshape(weights.shape)
        value = value.reshape(*weights.shape[:-2], *value.shape[-2:])
        total = contract("...ts,...sd->...td", weights, value, rules.precision)
        return total.reshape(*rows, value.shape[-1])

    numerator = jnp.zeros((*rows, value.shape[-1]), weights.dtype)
    denominator = jnp.zeros(rows, weights.dtype)
    if d_logits is not None:
        slopes = weights * merge_rows(d_logits, 2).astype(weights.dtype)
        numerator = numerator + sum_of(slopes, value)
        denominator = jnp.sum(slopes, axis=-1).reshape(rows)
    if direction.value is not None:
        numerator = numerator + sum_of(weights, direction.value)
    return StateTangent(numerator, denominator)


def _given(x: Array | None) -> tuple[Array, ...]:
    return () if x is None else (x,)


def _known(parameters: ScoreParameters | None) -> ScoreParameters:
    assert parameters is not None
    return parameters
