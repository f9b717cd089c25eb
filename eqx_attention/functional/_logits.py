r"""Logits: the one place where they are made, whatever walks over them.

$$x_{ij} = f(s \, q_i \cdot k_j, i, j)$$

with the scale s and the score f: a soft cap, then the bias or the caller's score, then
the bias of sink tokens. Pairs that may not attend get minus infinity, and so a weight
of exactly 0.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from .._config import Precision
from .._jax import accumulation_dtype, einsum
from ._score import ScoreParameters
from ._tiles import Layout, Tile
from ._visibility import Visibility


class LogitRules(eqx.Module):
    """How logits are made and which are left out: nothing here has a gradient."""

    visibility: Visibility
    dtype: DTypeLike = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)

    def with_visibility(self, visibility: Visibility) -> "LogitRules":
        """The same for other positions and masks, such as those of one sequence."""
        return LogitRules(visibility, self.dtype, self.precision)

    def products(
        self,
        query: Float[Array, "batch kv_heads group q_size qk_dim"],
        key: Float[Array, "batch kv_heads kv_size qk_dim"],
        layout: Layout,
    ) -> Float[Array, "..."]:
        """The dot products of a tile, accumulated in float32 or better."""
        spec = "bkgqd,bksd->bkgqs"
        if layout is Layout.QUERIES_MINOR:
            spec = "bksd,bkgqd->bksgq"
            query, key = key, query
        return contract(spec, query, key, self.precision)

    def score(
        self, products: Float[Array, "..."], parameters: ScoreParameters, tile: Tile
    ) -> Float[Array, "..."]:
        """Dot products to logits; `parameters` are those of the tile."""
        logits = products
        if parameters.scale is not None:
            logits = logits * parameters.scale.astype(logits.dtype)
        logits = logits.astype(self.dtype)
        if parameters.score is not None:
            pairs = self.visibility.pairs(tile)
            logits = parameters.score.modify(logits, pairs)
        return logits

    def allowed(
        self, parameters: ScoreParameters, tile: Tile
    ) -> Bool[Array, "..."] | None:
        """True for the pairs of a tile that have a weight; None if all have one."""
        allowed, finite = self.visibility.tile(tile), parameters.allowed(tile)
        if allowed is None or finite is None:
            return finite if allowed is None else allowed
        return allowed & finite

    def logits(
        self,
        products: Float[Array, "..."],
        parameters: ScoreParameters,
        tile: Tile,
        allowed: Bool[Array, "..."] | None,
    ) -> Float[Array, "..."]:
        """The logits of a tile, minus infinity where not `allowed` (None: all are)."""
        logits = self.score(products, parameters, tile)
        if allowed is None:
            return logits
        return jnp.where(allowed, logits, jnp.full_like(logits, -jnp.inf))


def drop_unseen(
    x: Float[Array, "batch kv_heads ..."],
    allowed: Bool[Array, "..."] | None,
    tile: Tile,
    *,
    axis: int = 2,
) -> Float[Array, "batch kv_heads ..."]:
    """Keys or values (along `axis`) with 0 for those that no query of the tile may see.

    A weight of 0 does not remove what it multiplies: 0 times NaN is NaN.
    """
    if allowed is None:
        return x
    axes = (2, 3) if tile.layout is Layout.KEYS_MINOR else (3, 4)
    seen = jnp.expand_dims(jnp.any(allowed, axis=axes), 5 - axis)
    return jnp.where(seen, x, jnp.zeros_like(x))


def contract(
    spec: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    precision: Precision,
) -> Float[Array, "..."]:
    """`einsum` that accumulates, and returns, float32 or better."""
    if a.dtype != b.dtype:
        dtype = accumulation_dtype(a, b)
        a, b = a.astype(dtype), b.astype(dtype)
    return einsum(spec, a, b, precision=precision)
