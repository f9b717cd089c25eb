"""Attention with entmax, by way of whole rows; differentiable by JAX itself."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._jax import accumulation_dtype, vary_together
from .._normalizer import Entmax
from ._block import attend_block, whole
from ._checks import debug_check_nan
from ._entmax import entmax
from ._inputs import Inputs
from ._layout import queries_by_position
from ._logits import contract
from ._problem import Problem
from ._tiles import Tile


@eqx.filter_jit
def entmax_standard(inputs: Inputs, normalizer: Entmax) -> tuple[Array, Array]:
    """Output and weights."""
    problem = vary_together(inputs.problem())
    out, weights = entmax_block(problem, alphas(inputs, normalizer), whole(problem))
    rows = (*inputs.batch_shape, inputs.query.shape[-2], *weights.shape[-2:])
    return entmax_output(inputs, out), weights.reshape(rows)


def entmax_output(inputs: Inputs, out: Float[Array, "..."]) -> Float[Array, "..."]:
    """The output in the caller's layout and dtype."""
    out = queries_by_position(out, inputs.batch_shape).astype(inputs.query.dtype)
    return debug_check_nan(out, inputs)


def alphas(inputs: Inputs, normalizer: Entmax) -> Float[Array, "1 kv_heads group 1"]:
    """Alpha of each head, in float32 or wider."""
    q_heads, kv_heads = inputs.query.shape[-2], inputs.key.shape[-2]
    dtype = accumulation_dtype(inputs.query, inputs.key, inputs.value)
    alpha = jnp.asarray(normalizer.alpha, dtype)
    if alpha.shape not in ((), (q_heads,)):
        raise ValueError(
            f"normalizer has alpha of shape {alpha.shape}, but needs () or "
            f"({q_heads},), as query has {q_heads} heads"
        )
    each = jnp.broadcast_to(alpha, (q_heads,))
    return each.reshape(1, kv_heads, q_heads // kv_heads, 1)


def entmax_block(
    problem: Problem, alpha: Float[Array, "1 kv_heads group 1"], tile: Tile
) -> tuple[Array, Array]:
    """Output and weights of the tile's queries, against all keys.

    The operands of `problem` hold the tile's queries alone.
    """
    logits = attend_block(problem, tile)[1]
    weights = entmax(logits, alpha)
    if problem.dropout is not None:
        weights = problem.dropout.apply(weights, tile)
    value = problem.operands.value
    # A weight of 0 does not remove what it multiplies: 0 times NaN is NaN.
    seen = jnp.any(logits > -jnp.inf, axis=(2, 3))[..., None]
    value = jnp.where(seen, value, jnp.zeros_like(value))
    out = contract("bkgts,bksd->bkgtd", weights, value, problem.rules.precision)
    return out, weights
