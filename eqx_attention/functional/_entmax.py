r"""Entmax: weights of a row of logits of which most are exactly 0.

With the maximum m of a row's logits and heights $z_j = (\alpha - 1) (x_j - m)$, which
are at most 0, the weights are $[z_j - \tau]_+^r$ with $r = 1 / (\alpha - 1)$. The
threshold lies between -1, where the highest weight alone is one, and 0. It is the root
of

$$\Bigl(\sum_j [z_j - \tau]_+^r\Bigr)^{1/r} - 1$$

a norm of what is above the threshold: convex, falling, and nearly linear where the sum
itself is steep. So Newton steps from -1 come closer to the root from one side, without
a bracket, and a few of them do.

The steps are taken here and not by optimistix: its linear solves lose track of what
varies over a mesh, so `jax.shard_map` refuses them.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from .._jax import vary_like, varying_axes
from .._primitive import array_type, bind, create_primitive, no_transpose
from ._online_softmax import finite

LOWEST = -1.0
"""The threshold where the search starts. What is not above it has no weight."""

_MAX_STEPS = 64


class Sums(eqx.Module):
    """Of the weights of a row, and of their derivatives by the logits."""

    weights: Float[Array, "*rows"]
    slopes: Float[Array, "*rows"]


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
        # log(0) has no derivative, not even where it is not used.
        kept, above = self._above(tau)
        some = jnp.exp(jnp.log(above) / (self.alpha - 1)[..., None])
        return jnp.where(kept, some, jnp.zeros_like(some))

    def sums(self, tau: Float[Array, "*rows"]) -> Sums:
        """Sums over the keys. Of $u^r$ the slope is, but for a factor, $u^{r - 1}$."""
        weights, (_, above) = self.weights(tau), self._above(tau)
        return Sums(jnp.sum(weights, axis=-1), jnp.sum(weights / above, axis=-1))

    def _above(
        self, tau: Float[Array, "*rows"]
    ) -> tuple[Bool[Array, "*rows keys"], Float[Array, "*rows keys"]]:
        """Which keys are above the threshold; by how much, and 1 for the others."""
        above = self.z - tau[..., None]
        kept = above > 0
        return kept, jnp.where(kept, above, jnp.ones_like(above))


def search(
    sums: Callable[[Float[Array, "*rows"]], Sums],
    alpha: Float[Array, "*#rows"],
    start: Float[Array, "*rows"],
) -> Float[Array, "*rows"]:
    """The threshold of each row, from the sums at a threshold.

    By Newton steps, in all rows at a time, until none is above eight times the rounding
    error of one. A row without keys stays where it starts.
    """
    tolerance = 1e-6 if start.dtype == jnp.float32 else 2e-15

    def go_on(carry: tuple[Array, Array, Array]) -> Bool[Array, ""]:
        _, last_step, count = carry
        return jnp.any(last_step > tolerance) & (count < _MAX_STEPS)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tau, _, count = carry
        found = sums(tau)
        empty = found.weights == 0
        mass = jnp.where(empty, jnp.ones_like(tau), found.weights)
        slopes = jnp.where(empty, jnp.ones_like(tau), found.slopes)
        length = (mass - jnp.exp((2 - alpha) * jnp.log(mass))) / slopes
        return tau + length, length, count + 1

    first = start, jnp.ones_like(start), jnp.int32(0)
    first = vary_like(first[:2], varying_axes(start)) + first[2:]
    return lax.while_loop(go_on, step, first)[0]


def entmax(
    logits: Float[Array, "*rows keys"], alpha: Float[Array, "*#rows"]
) -> Float[Array, "*rows keys"]:
    """The weights of each row, of alpha's dtype: 0 where no logit is finite."""
    max_logits = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    heights = Heights.of(logits, finite(max_logits).astype(alpha.dtype), alpha)
    weights = heights.weights(bind(_threshold, heights))
    # To rounding it is one already, but that grows with 1 / (alpha - 1).
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, jnp.ones_like(total), total)


def _threshold_of(heights: Heights) -> Float[Array, "*rows"]:
    lowest = jnp.min(heights.z, axis=-1, initial=LOWEST)
    return search(heights.sums, heights.alpha, jnp.full_like(lowest, LOWEST))


def _threshold_type(heights: Any) -> Any:
    return array_type(heights.z, heights.z.shape[:-1], heights.z.dtype)


def _threshold_jvp(primals: Any, tangents: Any) -> tuple[PyTree, PyTree]:
    """The derivative of the implicit function: of any order, as it uses itself."""
    (heights,) = primals
    tau = bind(_threshold, heights)

    def mass(heights: Heights) -> Array:
        return jnp.sum(heights.weights(tau), axis=-1)

    _, d_mass = eqx.filter_jvp(mass, (heights,), tangents)
    found = heights.sums(tau)
    slopes = jnp.where(found.weights == 0, jnp.ones_like(tau), found.slopes)
    return tau, (heights.alpha - 1) * d_mass / slopes


_threshold = create_primitive(
    "entmax_threshold", _threshold_of, _threshold_type, _threshold_jvp, no_transpose
)
