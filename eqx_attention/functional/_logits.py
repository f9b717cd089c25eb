r"""Logits: the one place where they are made, whatever walks over them.

$$x_{ij} = \mathrm{cap}(s \, q_i \cdot k_j) + b_{ij} + \beta_j, \qquad
\mathrm{cap}(x) = c \tanh(x / c)$$

with the scale s, the cap c, the bias b and the bias of the sink tokens, beta. Pairs
that may not attend get minus infinity, and so a weight of exactly 0.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from .._config import Precision
from .._jax import accumulation_dtype, einsum
from .._typing import Number
from ._tiles import Layout, Tile, read_chunk
from ._visibility import Visibility


class ScoreParameters(eqx.Module):
    """What a logit is made of beside the query and the key; all of it has gradients."""

    scale: Float[Array, ""] | None
    bias: Float[Array, "b k g q kv"] | None
    sink_bias: Float[Array, "kv_heads group num_sink_tokens"] | None

    def without_scale(self) -> "ScoreParameters":
        """The others alone."""
        return ScoreParameters(None, self.bias, self.sink_bias)

    def cut(self, tile: Tile) -> "ScoreParameters":
        """The parameters of one tile."""
        bias, sink_bias = self.bias, self.sink_bias
        if bias is not None:
            bias = tile.cut(bias, fill=0.0)
        if sink_bias is not None:
            sink_bias = read_chunk(
                sink_bias, tile.head_start, tile.kv_heads, axis=0, fill=0.0
            )
        return ScoreParameters(self.scale, bias, sink_bias)


class LogitRules(eqx.Module):
    """How logits are made and which are left out: nothing here has a gradient."""

    visibility: Visibility
    logits_soft_cap: Number | None = eqx.field(static=True)
    dtype: DTypeLike = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)

    def with_visibility(self, visibility: Visibility) -> "LogitRules":
        """The same for other positions and masks, such as those of one sequence."""
        return LogitRules(visibility, self.logits_soft_cap, self.dtype, self.precision)

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
        if self.logits_soft_cap is not None:
            logits = self.logits_soft_cap * jnp.tanh(logits / self.logits_soft_cap)
        if parameters.bias is not None:
            logits = logits + tile.arrange(parameters.bias).astype(self.dtype)
        if parameters.sink_bias is not None:
            logits = logits + self._sink_bias(parameters.sink_bias, tile)
        return logits

    def _sink_bias(
        self, sink_bias: Float[Array, "kv_heads group num_sink_tokens"], tile: Tile
    ) -> Float[Array, "..."]:
        """The bias of each key of the tile: that of its position, 0 past the sinks."""
        num_sinks = sink_bias.shape[-1]
        position = self.visibility.kv_positions.at(tile.kv_start, tile.kv_size)
        is_sink = (position >= 0) & (position < num_sinks)
        of_key = jnp.take(sink_bias, jnp.clip(position, 0, num_sinks - 1), axis=-1)
        of_key = jnp.moveaxis(of_key.astype(self.dtype), 2, 0)[:, :, :, None]
        of_key = jnp.where(is_sink[:, None, None, None], of_key, jnp.zeros_like(of_key))
        return tile.arrange(of_key)

    def allowed(
        self, parameters: ScoreParameters, tile: Tile
    ) -> Bool[Array, "..."] | None:
        """True for the pairs of a tile that have a weight; None if all have one."""
        allowed = self.visibility.tile(tile)
        if parameters.bias is None:
            return allowed
        finite = tile.arrange(parameters.bias) != -jnp.inf
        return finite if allowed is None else allowed & finite

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
