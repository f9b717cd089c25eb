"""Where tokens stand, and the pairs of a tile with their positions."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from ._tiles import Tile, read_chunk


class Positions(eqx.Module):
    """Where tokens stand: token i at `within[:, i] + offset`, or at `i + offset`.

    Positions within may be the same for the whole batch.
    """

    offset: Int[Array, " batch"]
    within: Int[Array, "#batch length"] | None

    def at(self, start: Int[Array, ""], size: int) -> Int[Array, "batch {size}"]:
        """The positions of `size` tokens from `start` on."""
        if self.within is None:
            index = (start + jnp.arange(size, dtype=jnp.int32))[None]
        else:
            index = read_chunk(self.within, start, size, axis=1, fill=0)
        return index + self.offset[:, None]


class Pairs(eqx.Module):
    """The pairs of a tile: what is asked of them is laid out to broadcast over it."""

    tile: Tile
    q_positions: Positions
    kv_positions: Positions

    @property
    def q_position(self) -> Int[Array, "..."]:
        """Where each query stands."""
        tile = self.tile
        return tile.over_queries(self.q_positions.at(tile.q_start, tile.q_size))

    @property
    def kv_position(self) -> Int[Array, "..."]:
        """Where each key stands."""
        tile = self.tile
        return tile.over_keys(self.kv_positions.at(tile.kv_start, tile.kv_size))

    @property
    def distance(self) -> Int[Array, "..."]:
        """How far each key stands after each query."""
        return self.kv_position - self.q_position


def sequences(starts: Int[Array, " offsets"], length: int) -> tuple[Array, Array]:
    """The sequence of each token, -1 for padding, and its position within it."""
    index = jnp.arange(length, dtype=jnp.int32)
    ids = jnp.searchsorted(starts, index, side="right").astype(jnp.int32) - 1
    within = index - jnp.take(starts, jnp.maximum(ids, 0), axis=0)
    return jnp.where(ids < starts.shape[0] - 1, ids, -1), within
