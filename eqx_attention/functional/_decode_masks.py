"""The masks of decoding: which slots of a cache hold keys, and trees of drafts."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped
from typing_extensions import override

from .._typing import Mask
from ._layout import flat_batch
from ._mask import AbstractMask, Extent, Grid
from ._positions import Pairs
from ._tiles import take_each


class Slots(AbstractMask):
    """Keys are real from one slot of a cache up to, and without, another."""

    start: Int[Array, " batch"]
    end: Int[Array, " batch"]

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By slot."""
        slot = pairs.tile.kv_index[None]
        inside = (slot >= self.start[:, None]) & (slot < self.end[:, None])
        return pairs.tile.over_keys(inside)

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the first and the last slot."""
        start, end = self.start[:, None, None], self.end[:, None, None]
        first, last = grid.kv.index
        return Extent((last >= start) & (first < end), (first >= start) & (last < end))


class Drafts(AbstractMask):
    """Drafts of a speculative tree see, of each other, their ancestors alone.

    (Miao et al. 2023, arXiv 2305.09781.) All see what was there before them.
    """

    sees: Bool[Array, "#batch q_len q_len"]
    draft: Int[Array, "#batch kv_len"]
    """Which draft the key of a slot is; negative for a key that was there before."""

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By the rows of the tree."""
        tile = pairs.tile
        draft = tile.of_keys(self.draft, fill=-1)
        sees = take_each(self.sees[:, None, None], draft, 4)
        return tile.arrange(sees) | tile.over_keys(draft < 0)

    @override
    def extent(self, grid: Grid) -> Extent:
        """Every pair where no key is a draft."""
        old = grid.kv.bounds(self.draft).high < 0
        return Extent(jnp.ones_like(old), old)

    def place(
        self, number: Int[Array, "#batch kv_len"], first: Int[Array, "#batch 1"]
    ) -> Int[Array, "#batch kv_len"]:
        """Where keys stand: drafts by their depth after `first`, others as they do."""
        index = jnp.clip(self.draft, 0, self.sees.shape[-1] - 1)
        depths = jnp.broadcast_to(self.depths, (index.shape[0], self.sees.shape[-1]))
        depth = jnp.take_along_axis(depths, index, axis=1)
        return jnp.where(self.draft < 0, number, first + depth)

    @property
    def depths(self) -> Int[Array, "#batch q_len"]:
        """How many drafts each has above it."""
        return jnp.sum(self.sees, axis=-1, dtype=jnp.int32) - 1


def split_drafts(
    mask: Mask | None, batch_shape: tuple[int, ...], q_len: int, capacity: int
) -> tuple[Shaped[Array, "flat_batch q_len q_len"] | None, Mask | None]:
    """A mask over the last q_len keys alone, made one of bools; and a mask over all."""
    if (
        not isinstance(mask, Array)
        or mask.ndim < 2
        or mask.shape[-1] in (1, capacity)
        or mask.shape[-1] != q_len
    ):
        return None, mask
    own = mask.shape[:-3]
    fits = mask.shape[-2] == q_len and mask.shape[-3:-2] in ((), (1,))
    fits = fits and len(own) <= len(batch_shape)
    for back in range(1, min(len(own), len(batch_shape)) + 1):
        fits = fits and own[-back] in (1, batch_shape[-back])
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}, but over the last {q_len} keys (it has no "
            f"more columns) it needs (*batch, 1, {q_len}, {q_len}) with *batch = "
            f"{batch_shape}"
        )
    sees = mask.reshape(*own, q_len, q_len).astype(bool)
    return flat_batch(sees, batch_shape, 2), None
