"""A tile: the part of the matrix of logits that is at hand, and how it is laid out.

Tiles have the axes `batch kv_heads`, then group (the query heads that share a key
head), queries and keys in one of two orders. The forward pass keeps keys minor, as the
softmax sums over them. The backward pass keeps queries minor: then each of its five
products contracts a minor axis of the tile or none, which on a CPU is twice as fast as
contracting a major one.
"""

import dataclasses
import enum

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Shaped

from .._jax import pad
from ._layout import keys_by_head, queries_by_head


class Layout(enum.Enum):
    """The order of a tile's last three axes."""

    KEYS_MINOR = "group queries keys"
    QUERIES_MINOR = "keys group queries"


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """How many key heads, queries and keys of a batch element a tile has at most."""

    kv_heads: int
    query: int
    key: int


class Tile(eqx.Module):
    """Which part: `kv_heads` heads from `head_start` on, and likewise `q` and `kv`.

    Heads are key heads, each with the whole group of query heads that share it.
    """

    head_start: Int[Array, ""]
    q_start: Int[Array, ""]
    kv_start: Int[Array, ""]
    kv_heads: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    q_size: int = eqx.field(static=True)
    kv_size: int = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)

    @property
    def q_index(self) -> Int[Array, " q_size"]:
        """The index of each query in its row of the batch."""
        return self.q_start + jnp.arange(self.q_size, dtype=jnp.int32)

    @property
    def kv_index(self) -> Int[Array, " kv_size"]:
        """The index of each key in its row of the batch."""
        return self.kv_start + jnp.arange(self.kv_size, dtype=jnp.int32)

    @property
    def heads(self) -> Int[Array, "..."]:
        """The index of each query head, laid out to broadcast over the tile."""
        count = self.kv_heads * self.group
        index = self.head_start * self.group + jnp.arange(count, dtype=jnp.int32)
        return self._over_heads(index.reshape(1, self.kv_heads, self.group))

    def over_queries(self, x: Shaped[Array, "batch q_size"]) -> Shaped[Array, "..."]:
        """One number for each query, laid out to broadcast over the tile."""
        if self.layout is Layout.KEYS_MINOR:
            return x[:, None, None, :, None]
        return x[:, None, None, None, :]

    def over_keys(self, x: Shaped[Array, "batch kv_size"]) -> Shaped[Array, "..."]:
        """One number for each key, laid out to broadcast over the tile."""
        if self.layout is Layout.KEYS_MINOR:
            return x[:, None, None, None, :]
        return x[:, None, :, None, None]

    def over_heads(
        self, x: Shaped[Array, "batch all_kv_heads group"]
    ) -> Shaped[Array, "..."]:
        """One number for each head there is, laid out to broadcast over the tile."""
        return self._over_heads(
            read_chunk(x, self.head_start, self.kv_heads, axis=1, fill=0)
        )

    def _over_heads(
        self, x: Shaped[Array, "batch kv_heads group"]
    ) -> Shaped[Array, "..."]:
        if self.layout is Layout.KEYS_MINOR:
            return x[..., None, None]
        return x[:, :, None, :, None]

    def rows(
        self, x: Shaped[Array, "batch kv_heads group q_size"]
    ) -> Shaped[Array, "..."]:
        """One number for each row, laid out to broadcast over the tile."""
        if self.layout is Layout.KEYS_MINOR:
            return x[..., None]
        return x[:, :, None]

    def arrange(
        self, x: Shaped[Array, "batch kv_heads group q_size kv_size"]
    ) -> Shaped[Array, "..."]:
        """A tile with keys minor (axes may be 1), in this tile's layout."""
        if self.layout is Layout.KEYS_MINOR:
            return x
        return jnp.moveaxis(x, -1, 2)

    def queries(
        self, x: Shaped[Array, "batch q_len q_heads dim"]
    ) -> Shaped[Array, "batch {self.kv_heads} {self.group} {self.q_size} dim"]:
        """This tile's part of what every query has, in whole chunks."""
        first_head, heads = self.head_start * self.group, self.kv_heads * self.group
        x = _slice(x, self.q_start, self.q_size, first_head, heads)
        return queries_by_head(x, self.kv_heads)

    def keys(
        self, x: Shaped[Array, "batch kv_len kv_heads dim"]
    ) -> Shaped[Array, "batch {self.kv_heads} {self.kv_size} dim"]:
        """This tile's part of what every key has, in whole chunks."""
        return keys_by_head(
            _slice(x, self.kv_start, self.kv_size, self.head_start, self.kv_heads)
        )

    def numbers(
        self, x: Shaped[Array, "batch kv_heads group q_len"]
    ) -> Shaped[Array, "..."]:
        """This tile's part of one number for each row, to broadcast over the tile."""
        x = read_chunk(x, self.head_start, self.kv_heads, axis=1, fill=0)
        x = read_chunk(x, self.q_start, self.q_size, axis=3, fill=0)
        return self.rows(x)

    def one_head(self, index: int) -> "Tile":
        """The part of one of this tile's key heads."""
        return Tile(
            *(self.head_start + index, self.q_start, self.kv_start),
            *(1, self.group, self.q_size, self.kv_size),
            self.layout,
        )

    def of_queries(
        self, x: Shaped[Array, "batch q_len"], *, fill: int
    ) -> Shaped[Array, "batch {self.q_size}"]:
        """This tile's part of one number for each query."""
        return read_chunk(x, self.q_start, self.q_size, axis=1, fill=fill)

    def of_keys(
        self, x: Shaped[Array, "batch kv_len"], *, fill: int
    ) -> Shaped[Array, "batch {self.kv_size}"]:
        """This tile's part of one number for each key."""
        return read_chunk(x, self.kv_start, self.kv_size, axis=1, fill=fill)

    def cut_heads(
        self, x: Shaped[Array, "batch all_kv_heads group rows columns"]
    ) -> Shaped[Array, "..."]:
        """The part of this tile's heads; axes may be 1."""
        return read_chunk(x, self.head_start, self.kv_heads, axis=1, fill=0)

    def cut(
        self, x: Shaped[Array, "batch kv_heads group q_len kv_len"], fill: float | int
    ) -> Shaped[Array, "..."]:
        """This tile of a whole matrix whose axes may be 1; `fill` beyond its ends."""
        x = self.cut_heads(x)
        x = read_chunk(x, self.q_start, self.q_size, axis=3, fill=fill)
        return read_chunk(x, self.kv_start, self.kv_size, axis=4, fill=fill)


class Matrix(eqx.Module):
    """A number for each pair of tokens, or one for many where an axis is 1.

    A tile uses its own part alone, in values and in gradients.
    """

    array: Float[Array, "b k g q kv"] | None

    def cut(self, tile: Tile) -> "Matrix":
        """The tile's part, 0 beyond the ends."""
        return Matrix(None if self.array is None else tile.cut(self.array, fill=0.0))

    def zeros(self, q_len: int, kv_len: int, dtype: DTypeLike) -> "Matrix":
        """What the gradients of tiles are added to: as this, with filled up ends."""
        if self.array is None:
            return self
        *heads, rows, columns = self.array.shape
        size = (q_len if rows > 1 else 1, kv_len if columns > 1 else 1)
        return Matrix(jnp.zeros((*heads, *size), dtype))

    def add(self, part: "Matrix", tile: Tile) -> "Matrix":
        """The sum with a tile's part."""
        if self.array is None or part.array is None:
            return self
        zero = jnp.int32(0)
        start = (zero, tile.head_start, zero, tile.q_start, tile.kv_start)
        return Matrix(add_at(self.array, part.array, start))

    def trimmed(self, like: "Matrix") -> "Matrix":
        """Without filled up ends."""
        if self.array is None or like.array is None:
            return self
        return Matrix(lax.slice(self.array, (0,) * 5, like.array.shape))


def is_matrix(x: object) -> bool:
    """Whether that is a `Matrix`: a leaf that is cut for each tile."""
    return isinstance(x, Matrix)


def add_at(
    total: Float[Array, "..."],
    part: Float[Array, "..."],
    start: tuple[Int[Array, ""], ...],
) -> Float[Array, "..."]:
    """`total` with `part` added from `start` on. Axes of 1 start at 0, by clamping."""
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part.astype(total.dtype), start)


def merge_rows(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """`x` with group (at `axis`) and queries as one axis, and without a batch of 1.

    Products are made of arrays like this. If others are given to them, XLA reshapes
    weights on their way into the product, and for that computes them twice.
    """
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return x.reshape(shape[1:] if shape[0] == 1 else shape)


def _slice(
    x: Shaped[Array, "batch length heads dim"],
    start: Int[Array, ""],
    size: int,
    first_head: Int[Array, ""],
    heads: int,
) -> Shaped[Array, "batch {size} {heads} dim"]:
    """`size` positions of some heads, which must be there.

    In one step: a slice of heads alone would not depend on the chunk, and XLA might
    make it, of the whole length, ahead of a loop over chunks.
    """
    zero = jnp.int32(0)
    sizes = (x.shape[0], size, heads, x.shape[3])
    return lax.dynamic_slice(x, (zero, start, first_head, zero), sizes)


def read_chunk(
    x: Shaped[Array, "..."],
    start: Int[Array, ""],
    size: int,
    *,
    axis: int,
    fill: float | int,
) -> Shaped[Array, "..."]:
    """`size` entries along `axis`, with `fill` past the end; an axis of 1 stays so.

    `x` itself is never padded: it may be a matrix of the whole N x N. `size` is at
    most the length.
    """
    length = x.shape[axis]
    if length in (1, size):
        return x
    if length % size == 0:
        return lax.dynamic_slice_in_dim(x, start, size, axis)
    first = jnp.minimum(start, length - size)
    chunk = lax.dynamic_slice_in_dim(x, first, size, axis)
    return shift(chunk, start - first, axis=axis, fill=fill)


def take_each(
    x: Bool[Array, "..."], index: Int[Array, "batch count"], axis: int
) -> Bool[Array, "..."]:
    """Entries of `x` along `axis`, of each batch element its own; False beyond it."""
    inside = (index >= 0) & (index < x.shape[axis])
    index = jnp.clip(index, 0, x.shape[axis] - 1)
    if index.shape[0] == 1:
        taken = jnp.take(x, index[0], axis=axis)
    else:
        x = jnp.broadcast_to(x, (index.shape[0], *x.shape[1:]))

        def take(x: Array, index: Array) -> Array:
            return jnp.take(x, index, axis=axis - 1)

        taken = jax.vmap(take)(x, index)
    over = [1] * x.ndim
    over[0], over[axis] = index.shape
    return taken & inside.reshape(over)


def shift(
    x: Shaped[Array, "..."], by: Int[Array, ""], *, axis: int, fill: float | int
) -> Shaped[Array, "..."]:
    """`x` without its first `by` entries along `axis`, and with `fill` at its end."""
    size = x.shape[axis]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size)
    return lax.dynamic_slice_in_dim(pad(x, widths, fill=fill), by, size, axis)
