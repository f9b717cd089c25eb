"""What a mask is: it says of pairs of tokens, and of chunks, whether they attend."""

import abc
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer
from typing_extensions import override

from .._jax import map_, pad
from ._layout import flat_batch
from ._positions import Pairs, Positions
from ._tiles import Layout, Tile, read_chunk

_FAR = int(np.iinfo(np.int32).max) // 2


class LogitsShape(NamedTuple):
    """The sizes that a mask or a score is used with."""

    batch: tuple[int, ...]
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.q_heads // self.kv_heads

    def per_element(
        self, name: str, x: Integer[Array, "..."], *axes: int
    ) -> Int[Array, "flat_batch ..."]:
        """`x`, of shape `*batch axes`, as int32 with one batch axis of 1 or its size.

        Batch axes may be left out, or be 1. `name` is what an error calls it.
        """
        own = x.shape[: max(x.ndim - len(axes), 0)]
        fits = x.shape[len(own) :] == axes and len(own) <= len(self.batch)
        for back in range(1, min(len(own), len(self.batch)) + 1):
            fits = fits and own[-back] in (1, self.batch[-back])
        if not fits:
            raise ValueError(
                f"{name} has shape {x.shape}, but needs {(*self.batch, *axes)} "
                "(batch axes may be 1 or be left out)"
            )
        return flat_batch(x, self.batch, len(axes))


class Range(NamedTuple):
    """The lowest and the highest number of each chunk."""

    low: Int[Array, "#batch 1 chunks"]
    high: Int[Array, "#batch 1 chunks"]


class Side(eqx.Module):
    """The chunks of queries, or of keys, to be looked at: `chunk`, or all if None."""

    positions: Positions
    chunk: Int[Array, ""] | None
    length: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    @property
    def count(self) -> int:
        """How many chunks the whole side has."""
        return -(-self.length // self.size)

    @property
    def index(self) -> Range:
        """The first and the last index of each chunk, which may be past the end."""
        chunk = self.chunk
        if chunk is None:
            first = self.size * jnp.arange(self.count, dtype=jnp.int32)
        else:
            first = (self.size * chunk)[None]
        return Range(first[None, None], first[None, None] + (self.size - 1))

    @property
    def position(self) -> Range:
        """The bounds of the positions of each chunk."""
        offset = self.positions.offset[:, None, None]
        if self.positions.within is None:
            low, high = self.index
        else:
            low, high = self.bounds(self.positions.within)
        return Range(low + offset, high + offset)

    def part(self, other: Int[Array, ""] | None) -> tuple[Int[Array, ""], int]:
        """Start and size of the chunk, or else of `other`, or else of all."""
        chunk = other if self.chunk is None else self.chunk
        if chunk is None:
            return jnp.int32(0), self.length
        return chunk * self.size, self.size

    def bounds(self, x: Int[Array, "#batch length"]) -> Range:
        """The bounds of what is given for each token."""
        return Range(
            self._reduce(jnp.min, x, fill=_FAR), self._reduce(jnp.max, x, fill=-_FAR)
        )

    def _reduce(
        self, reduce: Callable[..., Array], x: Int[Array, "#batch length"], *, fill: int
    ) -> Int[Array, "#batch 1 chunks"]:
        """`reduce` over each chunk, whose end is filled up."""
        if self.chunk is not None:
            start = self.chunk * self.size
            part = read_chunk(x, start, self.size, axis=1, fill=fill)
            return reduce(part, axis=1)[:, None, None]
        x = pad(x, ((0, 0), (0, self.count * self.size - self.length)), fill=fill)
        return reduce(x.reshape(x.shape[0], self.count, self.size), axis=2)[:, None]


class Grid(eqx.Module):
    """One chunk of queries against all of keys, or the other way round."""

    q: Side
    kv: Side
    kv_heads: int = eqx.field(static=True)
    group: int = eqx.field(static=True)

    @property
    def distance(self) -> Range:
        """The bounds of how far keys stand after queries."""
        q, kv = self.q.position, self.kv.position
        return Range(kv.low - q.high, kv.high - q.low)

    @property
    def num_chunks(self) -> int:
        """How many pairs of chunks are looked at."""
        return self.kv.count if self.kv.chunk is None else self.q.count

    def pairs(self, other: Int[Array, ""] | None) -> Pairs:
        """All pairs of the one chunk and another, or all others if that is None."""
        (q_start, q_size), (kv_start, kv_size) = (
            side.part(other) for side in (self.q, self.kv)
        )
        tile = Tile(
            *(jnp.int32(0), q_start, kv_start),
            *(self.kv_heads, self.group, q_size, kv_size),
            Layout.KEYS_MINOR,
        )
        return Pairs(tile, self.q.positions, self.kv.positions)

    def by_chunk(self, allowed: Bool[Array, "batch kv_heads group q kv"]) -> "Extent":
        """The extents for all heads, where `allowed` is of the one chunk and all."""
        axis, side = (4, self.kv) if self.kv.chunk is None else (3, self.q)
        if allowed.shape[axis] == 1:
            axes = (1, 2, 3, 4)
            some, every = jnp.any(allowed, axis=axes), jnp.all(allowed, axis=axes)
            return Extent(some[:, None, None], every[:, None, None])
        widths = [(0, 0)] * 5
        widths[axis] = (0, side.count * side.size - side.length)
        allowed = pad(allowed, widths)
        split = (*allowed.shape[:axis], side.count, side.size)
        allowed = allowed.reshape(*split, *allowed.shape[axis + 1 :])
        axes = tuple(i for i in range(1, 6) if i != axis)
        some, every = jnp.any(allowed, axis=axes), jnp.all(allowed, axis=axes)
        return Extent(some[:, None], every[:, None])


class Extent(eqx.Module):
    """Whether some, and whether every, pair of tokens of two chunks may attend.

    In doubt it says some, and not every: then the pairs are looked at one by one.
    """

    some: Bool[Array, "#batch #kv_heads chunks"]
    every: Bool[Array, "#batch #kv_heads chunks"]

    @property
    def by_head(self) -> bool:
        """True if heads have extents of their own."""
        return self.some.shape[1] > 1 or self.every.shape[1] > 1

    def __and__(self, other: "Extent") -> "Extent":
        return Extent(self.some & other.some, self.every & other.every)

    def __or__(self, other: "Extent") -> "Extent":
        return Extent(self.some | other.some, self.every | other.every)

    def __invert__(self) -> "Extent":
        return Extent(~self.every, ~self.some)


class AbstractMask(eqx.Module):
    """Which queries may attend to which keys. Masks are joined by `&`, `|` and `~`.

    A module like any other: its arrays may be traced, and it passes through `jit`,
    `vmap` and `scan`. A mask of one's own is an [`eqx_attention.masks.Rule`][].
    """

    # Who calls `tile` and `extent` calls `bind` before: after that, each array has a
    # batch axis in front, of the batch's size or 1.

    @property
    def is_local(self) -> bool:
        """Whether it leaves each query few keys: small chunks suit it then."""
        return False

    def bind(self, shape: LogitsShape) -> "AbstractMask":
        """The mask for these sizes, which it has to fit."""
        del shape
        return self

    @abc.abstractmethod
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """True for the allowed pairs, to broadcast over the tile."""

    def extent(self, grid: Grid) -> Extent:
        """How much of each pair of chunks is allowed. By default, all pairs are tried.

        That costs a look at every pair, of one tile after the other.
        """

        def look(chunk: Int[Array, ""]) -> tuple[Array, Array]:
            allowed = self.tile(grid.pairs(chunk))
            axes = (2, 3, 4)
            return jnp.any(allowed, axis=axes), jnp.all(allowed, axis=axes)

        some, every = map_(look, jnp.arange(grid.num_chunks, dtype=jnp.int32))
        return Extent(jnp.moveaxis(some, 0, -1), jnp.moveaxis(every, 0, -1))

    def __and__(self, other: "AbstractMask") -> "AbstractMask":
        return And((self, other))

    def __or__(self, other: "AbstractMask") -> "AbstractMask":
        return Or((self, other))

    def __invert__(self) -> "AbstractMask":
        return Not(self)


class And(AbstractMask):
    """Allows what all of the masks allow; written `a & b`."""

    masks: tuple[AbstractMask, ...]

    @property
    @override
    def is_local(self) -> bool:
        """Whether one of them is."""
        return any(mask.is_local for mask in self.masks)

    @override
    def bind(self, shape: LogitsShape) -> "And":
        """Binds each."""
        return And(tuple(mask.bind(shape) for mask in self.masks))

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """What all allow."""
        allowed = self.masks[0].tile(pairs)
        for mask in self.masks[1:]:
            allowed = allowed & mask.tile(pairs)
        return allowed

    @override
    def extent(self, grid: Grid) -> Extent:
        """Some only if some of each; every if every of each."""
        extent = self.masks[0].extent(grid)
        for mask in self.masks[1:]:
            extent = extent & mask.extent(grid)
        return extent

    @override
    def __repr__(self) -> str:
        return " & ".join(
            f"({mask!r})" if isinstance(mask, Or) else repr(mask) for mask in self.masks
        )


class Or(AbstractMask):
    """Allows what any of the masks allows; written `a | b`."""

    masks: tuple[AbstractMask, ...]

    @override
    def bind(self, shape: LogitsShape) -> "Or":
        """Binds each."""
        return Or(tuple(mask.bind(shape) for mask in self.masks))

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """What any allows."""
        allowed = self.masks[0].tile(pairs)
        for mask in self.masks[1:]:
            allowed = allowed | mask.tile(pairs)
        return allowed

    @override
    def extent(self, grid: Grid) -> Extent:
        """Some if some of any; every if every of any."""
        extent = self.masks[0].extent(grid)
        for mask in self.masks[1:]:
            extent = extent | mask.extent(grid)
        return extent

    @override
    def __repr__(self) -> str:
        return " | ".join(repr(mask) for mask in self.masks)


class Not(AbstractMask):
    """Allows what the mask forbids; written `~a`."""

    mask: AbstractMask

    @override
    def bind(self, shape: LogitsShape) -> "Not":
        """Binds it."""
        return Not(self.mask.bind(shape))

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """What it forbids."""
        return ~self.mask.tile(pairs)

    @override
    def extent(self, grid: Grid) -> Extent:
        """Some if not every; every if none."""
        return ~self.mask.extent(grid)

    @override
    def __repr__(self) -> str:
        joined = isinstance(self.mask, And | Or)
        return f"~({self.mask!r})" if joined else f"~{self.mask!r}"


def intersection(*masks: AbstractMask | None) -> AbstractMask | None:
    """What all of these allow; None allows all."""
    given = tuple(mask for mask in masks if mask is not None)
    if len(given) > 1:
        return And(given)
    return given[0] if given else None
