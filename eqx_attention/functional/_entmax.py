r"""Entmax: weights of a row of logits of which most are exactly 0.

With the maximum m of a row's logits and heights $z_j = (\alpha - 1) (x_j - m)$, which
are at most 0, the weights are $[z_j - \tau]_+^r$ with $r = 1 / (\alpha - 1)$. The
threshold lies between -1, where the highest weight alone is one, and 0. It is the root
of

$$\Bigl(\sum_j [z_j - \tau]_+^r\Bigr)^{1/r} - 1$$

a norm of what is above the threshold: convex, falling, and nearly linear where the sum
itself is steep. So Newton steps from -1 come closer to the root from one side, without
a bracket, and a few of them do.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .._root import find_roots, tolerance
from ._online_softmax import finite

LOWEST = -1.0
"""The threshold where the search starts. What is not above it has no weight."""


class Heights(eqx.Module):
    """`z` of some keys, from the maximum of the whole row, and the row's alpha."""

    z: Float[Array, "*rows keys"]
    alpha: Float[Array, "*#rows"]

    @staticmethod
    def of(
        logits: Float[Array, "*rows keys"],
        max_logits: Float[Array, "*rows"],
        alpha: Float[Array, "*#rows"],
    ) -> "Heights":
        """Of logits, of which those that are minus infinity are never above."""
        allowed = logits > -jnp.inf
        logits = jnp.where(allowed, logits.astype(alpha.dtype), max_logits[..., None])
        z = (alpha[..., None] - 1) * (logits - max_logits[..., None])
        return Heights(jnp.where(allowed, z, jnp.full_like(z, 2 * LOWEST)), alpha)

    def weights(self, tau: Float[Array, "*rows"]) -> Float[Array, "*rows keys"]:
        """What is above the threshold, to the power of 1 / (alpha - 1)."""
        above = self.z - tau[..., None]
        power = (1 / (self.alpha - 1))[..., None]
        # log(0) has no derivative, not even where it is not used.
        kept = above > 0
        some = jnp.exp(power * jnp.log(jnp.where(kept, above, jnp.ones_like(above))))
        return jnp.where(kept, some, jnp.zeros_like(some))


def excess(
    mass: Float[Array, "*rows"],
    tau: Float[Array, "*rows"],
    alpha: Float[Array, "*#rows"],
    empty: Bool[Array, "*rows"],
) -> Float[Array, "*rows"]:
    """How far the norm of the weights, whose sum is `mass`, is above one."""
    mass = jnp.where(empty, jnp.ones_like(mass), mass)
    norm = jnp.exp((alpha - 1) * jnp.log(mass))
    # A row without keys has no threshold: the search stays where it started.
    return jnp.where(empty, tau - LOWEST, norm - 1)


def entmax(
    logits: Float[Array, "*rows keys"], alpha: Float[Array, "*#rows"]
) -> Float[Array, "*rows keys"]:
    """The weights of each row, of alpha's dtype: 0 where no logit is finite."""
    max_logits = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    empty = max_logits == -jnp.inf
    heights = Heights.of(logits, finite(max_logits).astype(alpha.dtype), alpha)

    def too_much(tau: Array, heights: Heights) -> Array:
        mass = jnp.sum(heights.weights(tau), axis=-1)
        return excess(mass, tau, heights.alpha, empty)

    start = jnp.full(max_logits.shape, LOWEST, alpha.dtype)
    tau = find_roots(too_much, start, heights, tolerance=tolerance(alpha))
    weights = heights.weights(tau)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(empty[..., None], jnp.ones_like(total), total)
