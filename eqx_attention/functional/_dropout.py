"""Which weights are kept: a function of the key and the absolute position alone.

Each (batch, head, query) gets 64 random bits by `jax.random.fold_in`. They choose an
affine map of the key's index, and an integer hash (C. Wellons, "Prospecting for hash
functions", 2018: lowbias32) turns its value into the 32 bits that are compared with
the probability. So any part of the pattern can be made again anywhere, in the forward
and in the backward pass, on every backend and for any chunk size. Threefry for each
pair would do the same; on a CPU it takes ten times as long as the chunk's products.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from .._jax import threefry_key
from .._typing import Number
from ._tiles import Tile


class Dropout(eqx.Module):
    """The key, and the number of each batch element that is at hand."""

    key: PRNGKeyArray
    batch_index: Int[Array, " batch"]
    prob: Number = eqx.field(static=True)

    @staticmethod
    def of(key: PRNGKeyArray, batch: int, prob: Number) -> "Dropout":
        """For a whole batch; a key of any kind, whose own `fold_in` need not be one.

        With `unsafe_rbg` it would give other bits in a batch of other queries.
        """
        words = jax.random.bits(key, (2,), jnp.uint32)
        return Dropout(threefry_key(words), jnp.arange(batch, dtype=jnp.int32), prob)

    @property
    def kept_scale(self) -> float:
        """What kept weights are multiplied by: 1 / (1 - p), and 0 if none is kept."""
        return 0.0 if self.prob == 1 else 1 / (1 - self.prob)

    def apply(self, weights: Float[Array, "..."], tile: Tile) -> Float[Array, "..."]:
        """The weights of a tile: kept ones divided by 1 - p, the others 0."""
        shape = (tile.kv_heads, tile.group)
        keep = self.keep(tile.heads.reshape(-1), tile.q_index, tile.kv_index)
        keep = tile.arrange(keep.reshape(keep.shape[0], *shape, *keep.shape[2:]))
        return jnp.where(keep, weights * self.kept_scale, jnp.zeros_like(weights))

    def keep(
        self,
        heads: Int[Array, " heads"],
        q_index: Int[Array, " q_size"],
        kv_index: Int[Array, " kv_size"],
    ) -> Bool[Array, "batch heads q_size kv_size"]:
        """True for the pairs whose weight is kept."""

        def row_bits(
            batch: Array, head: Array, query: Array
        ) -> UInt32[Array, " words"]:
            key = jax.random.fold_in(self.key, batch)
            key = jax.random.fold_in(jax.random.fold_in(key, head), query)
            return jax.random.key_data(key).reshape(-1)[:2]

        over_queries = jax.vmap(row_bits, in_axes=(None, None, 0))
        over_heads = jax.vmap(over_queries, in_axes=(None, 0, None))
        over_batch = jax.vmap(over_heads, in_axes=(0, None, None))
        words = over_batch(self.batch_index, heads, q_index)
        offset, stride = words[..., 0, None], words[..., 1, None] | jnp.uint32(1)
        columns = kv_index.astype(jnp.uint32)[None, None, None, :]
        bits = lowbias32(columns * stride + offset)
        threshold = math.floor(self.prob * 2**32)
        if threshold >= 2**32:
            return jnp.zeros(bits.shape, bool)
        return bits >= jnp.uint32(threshold)


def lowbias32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which each input bit turns half of the output."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
