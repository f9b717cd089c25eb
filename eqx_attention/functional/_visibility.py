"""Which query may attend to which key, pair by pair.

The chunks of pairs that hold work are found from the same fields in `_schedule.py`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer

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


class Visibility(eqx.Module):
    """Who may attend to whom. Arrays with a batch axis have it as 1 or as `batch`.

    `left` and `right` bound the distance `kv position - query position`: causality is
    `right = 0`. The first `num_sink_tokens` positions are exempt from `left`. Segment
    ids must agree and not be negative. Keys are real from `kv_range[0]` up to, and
    without, `kv_range[1]`.
    """

    q_positions: Positions
    kv_positions: Positions
    segments: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None
    mask: Bool[Array, "..."] | Integer[Array, "..."] | None
    kv_range: tuple[Int[Array, " batch"], Int[Array, " batch"]] | None
    q_len: int = eqx.field(static=True)
    kv_len: int = eqx.field(static=True)
    left: int | None = eqx.field(static=True)
    right: int | None = eqx.field(static=True)
    num_sink_tokens: int = eqx.field(static=True)

    @property
    def unrestricted(self) -> bool:
        """True if nothing forbids any pair."""
        return (
            self.left is None
            and self.right is None
            and self.segments is None
            and self.mask is None
            and self.kv_range is None
        )

    @property
    def differs_in_batch(self) -> bool:
        """True if batch elements have rules of their own."""
        return any(x.shape[0] > 1 for x in jax.tree.leaves(self))

    def tile(self, tile: Tile) -> Bool[Array, "..."] | None:
        """True for the allowed pairs, to broadcast over the tile; None if all are."""
        terms: list[Array] = []
        if self.left is not None or self.right is not None:
            kv_position = tile.over_keys(
                self.kv_positions.at(tile.kv_start, tile.kv_size)
            )
            q_position = tile.over_queries(
                self.q_positions.at(tile.q_start, tile.q_size)
            )
            distance = kv_position - q_position
            if self.right is not None:
                terms.append(distance <= self.right)
            if self.left is not None:
                near = distance >= -self.left
                if self.num_sink_tokens > 0:
                    near = near | (kv_position < self.num_sink_tokens)
                terms.append(near)
        if self.segments is not None:
            q_ids, kv_ids = self.segments
            q_ids = tile.over_queries(
                read_chunk(q_ids, tile.q_start, tile.q_size, axis=1, fill=-1)
            )
            kv_ids = tile.over_keys(
                read_chunk(kv_ids, tile.kv_start, tile.kv_size, axis=1, fill=-1)
            )
            terms.append((q_ids == kv_ids) & (q_ids >= 0))
        if self.mask is not None:
            terms.append(tile.arrange(tile.cut(self.mask, fill=0).astype(bool)))
        kv_index = tile.kv_index[None]
        if self.kv_range is not None:
            start, end = self.kv_range
            inside = (kv_index >= start[:, None]) & (kv_index < end[:, None])
            terms.append(tile.over_keys(inside))
        elif tile.kv_size != self.kv_len and self.kv_len % tile.kv_size:
            terms.append(tile.over_keys(kv_index < self.kv_len))
        if tile.q_size != self.q_len and self.q_len % tile.q_size:
            # Past the last query there is filling, to which a key that no query may
            # see would else be visible.
            terms.append(tile.over_queries((tile.q_index < self.q_len)[None]))
        if not terms:
            return None
        allowed = terms[0]
        for term in terms[1:]:
            allowed = allowed & term
        return allowed
