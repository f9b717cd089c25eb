"""Which query may attend to which key, pair by pair.

The chunks of pairs that hold work are found from the same mask in `_schedule.py`.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Bool

from ._mask import AbstractMask
from ._positions import Pairs, Positions
from ._tiles import Tile


class Visibility(eqx.Module):
    """Who may attend to whom: where tokens stand, and a mask that is bound.

    Each array has a batch axis in front, of 1 or the batch's size.
    """

    q_positions: Positions
    kv_positions: Positions
    mask: AbstractMask | None
    q_len: int = eqx.field(static=True)
    kv_len: int = eqx.field(static=True)

    @property
    def differs_in_batch(self) -> bool:
        """True if batch elements have rules of their own."""
        return any(x.shape[0] > 1 for x in jax.tree.leaves(self))

    def pairs(self, tile: Tile) -> Pairs:
        """The tile's pairs."""
        return Pairs(tile, self.q_positions, self.kv_positions)

    def tile(self, tile: Tile) -> Bool[Array, "..."] | None:
        """True for the allowed pairs, to broadcast over the tile; None if all are."""
        terms: list[Array] = []
        if self.mask is not None:
            terms.append(self.mask.tile(self.pairs(tile)))
        if tile.kv_size != self.kv_len and self.kv_len % tile.kv_size:
            terms.append(tile.over_keys((tile.kv_index < self.kv_len)[None]))
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
