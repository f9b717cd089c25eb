"""Masks to look at: as an array, as text and as a picture."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ._config import ChunkSizes, check_int, default_chunk_sizes
from ._jax import map_
from .functional._mask import AbstractMask, Extent, Grid, LogitsShape, Side
from .functional._positions import Pairs, Positions
from .functional._tiles import Layout, Tile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELLS = 64


def to_array(
    mask: AbstractMask,
    q_len: int,
    kv_len: int,
    *,
    batch: tuple[int, ...] = (),
    q_heads: int = 1,
    kv_heads: int | None = None,
) -> Bool[Array, "*batch q_heads q_len kv_len"]:
    """The mask as an array of all pairs, for what knows no other.

    **Arguments:**

    - `mask`: a mask.
    - `q_len`, `kv_len`: how many queries and keys.
    - `batch`, `q_heads`, `kv_heads`: the sizes of the other axes, for masks that differ
        along them; by default no batch axis, and one head. `kv_heads` is `q_heads`
        by default.

    **Returns:** bool, `*batch q_heads q_len kv_len`.

    **Raises:** `ValueError` for a mask that does not fit these sizes.
    """
    kv_heads = q_heads if kv_heads is None else kv_heads
    shape = LogitsShape(batch, q_heads, kv_heads, q_len, kv_len)
    return _whole(mask, shape)


def draw(
    mask: AbstractMask, q_len: int, kv_len: int, *, q_heads: int = 1, head: int = 0
) -> str:
    """The mask as text: a row for each query, a column for each key.

    `#` may attend, `.` may not; where there are more than 64 queries or keys, a sign
    stands for a few of them, and `+` says that some may.

    **Arguments:**

    - `mask`, `q_len`, `kv_len`: as in [`eqx_attention.masks.to_array`][].
    - `q_heads`, `head`: how many heads there are, and which one to draw; by default the
        only one.
    """
    allowed = _one_head(mask, q_len, kv_len, q_heads, head)
    some, every = (_coarse(reduce, allowed) for reduce in (np.max, np.min))
    signs = np.where(every, "#", np.where(some, "+", "."))
    return "\n".join("".join(row) for row in signs)


def show(
    mask: AbstractMask,
    q_len: int,
    kv_len: int,
    *,
    chunk_sizes: ChunkSizes | None = None,
    q_heads: int = 1,
    head: int = 0,
) -> "Figure":
    """A picture of the mask, and of the chunks that flash attention makes of it.

    On the left the allowed pairs. On the right what the schedule says of each pair of
    chunks: skipped, whole (nothing is masked there) or partial; and the share of work
    that is left. It needs matplotlib.

    **Arguments:**

    - `chunk_sizes`: by default [`eqx_attention.default_chunk_sizes`][].
    - The rest is as in [`eqx_attention.masks.draw`][].

    **Returns:** a matplotlib `Figure`, to be shown or saved.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    sizes = chunk_sizes or default_chunk_sizes(q_len, kv_len, local=mask.is_local)
    allowed = _one_head(mask, q_len, kv_len, q_heads, head)
    kind = chunk_kinds(mask, q_len, kv_len, sizes, q_heads=q_heads, head=head)
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    extent = (0, kv_len, q_len, 0)
    left.imshow(
        allowed, cmap="Greys", vmin=0, vmax=1.6, extent=extent, interpolation="none"
    )
    left.set_title("pairs that may attend")
    colours = ListedColormap(["white", "#f2b35e", "#4c78a8"])
    right.imshow(
        kind,
        cmap=colours,
        vmin=0,
        vmax=2,
        extent=(0, kind.shape[1] * sizes.key, kind.shape[0] * sizes.query, 0),
        interpolation="none",
    )
    work = np.mean(kind > 0)
    right.set_title(
        f"chunks of {sizes.query} x {sizes.key}: {work:.0%} of the work\n"
        "blue: whole, orange: partial, white: skipped",
        fontsize="medium",
    )
    for axes in (left, right):
        axes.set(xlabel="key", ylabel="query", xlim=(0, kv_len), ylim=(q_len, 0))
    figure.suptitle(repr(mask))  # pyright: ignore[reportUnknownMemberType]  # its **kwargs
    return figure


def chunk_kinds(
    mask: AbstractMask,
    q_len: int,
    kv_len: int,
    sizes: ChunkSizes,
    *,
    q_heads: int = 1,
    head: int = 0,
) -> Int[np.ndarray, "q_chunks kv_chunks"]:
    """2 for each pair of chunks whose pairs may all attend, 1 for some, 0 for none.

    As the schedule sees it: where it is in doubt, it says some.
    """
    shape = LogitsShape((), q_heads, q_heads, q_len, kv_len)
    query, key = min(sizes.query, q_len), min(sizes.key, kv_len)
    extent = _extents(mask, shape, query, key)
    some, every = (
        np.asarray(x[:, 0, head if x.shape[2] > 1 else 0])
        for x in (extent.some, extent.every)
    )
    chunks = (-(-q_len // query), -(-kv_len // key))
    some, every = np.broadcast_to(some, chunks), np.broadcast_to(every, chunks)
    every = every & some
    if kv_len % key:  # the last chunk is filled up, which has to be masked
        every = np.concatenate([every[:, :-1], np.zeros_like(every[:, -1:])], axis=1)
    return some.astype(int) + every


@eqx.filter_jit
def _extents(mask: AbstractMask, shape: LogitsShape, query: int, key: int) -> Extent:
    """What the mask says of all pairs of chunks, with those of queries in front."""
    bound, positions = mask.bind(shape), _in_a_row()

    def row(chunk: Int[Array, ""]) -> Extent:
        q = Side(positions, chunk, shape.q_len, query)
        kv = Side(positions, None, shape.kv_len, key)
        return bound.extent(Grid(q, kv, shape.kv_heads, shape.group))

    return map_(row, jnp.arange(-(-shape.q_len // query), dtype=jnp.int32))


@eqx.filter_jit
def _whole(
    mask: AbstractMask, shape: LogitsShape
) -> Bool[Array, "*batch q_heads q_len kv_len"]:
    zero, positions = jnp.int32(0), _in_a_row()
    sizes = (shape.kv_heads, shape.group, shape.q_len, shape.kv_len)
    tile = Tile(zero, zero, zero, *sizes, Layout.KEYS_MINOR)
    allowed = mask.bind(shape).tile(Pairs(tile, positions, positions))
    batch = 1
    for size in shape.batch:
        batch *= size
    allowed = jnp.broadcast_to(allowed, (batch, *sizes))
    return allowed.reshape(*shape.batch, shape.q_heads, shape.q_len, shape.kv_len)


def _in_a_row() -> Positions:
    return Positions(jnp.zeros(1, jnp.int32), None)


def _one_head(
    mask: AbstractMask, q_len: int, kv_len: int, q_heads: int, head: int
) -> Bool[np.ndarray, "q_len kv_len"]:
    check_int("head", head)
    if not 0 <= head < q_heads:
        raise ValueError(f"head is {head}, but there are {q_heads} heads")
    return np.asarray(to_array(mask, q_len, kv_len, q_heads=q_heads)[head])


def _coarse(
    reduce: Callable[..., np.ndarray], allowed: Bool[np.ndarray, "q_len kv_len"]
) -> Bool[np.ndarray, "rows columns"]:
    """One entry for a few queries and keys, at most 64 x 64."""
    for axis in (0, 1):
        size = -(-allowed.shape[axis] // _CELLS)
        ends = list(range(size, allowed.shape[axis], max(size, 1)))
        parts = np.split(allowed, ends, axis=axis)
        allowed = np.stack([reduce(part, axis=axis) for part in parts], axis=axis)
    return allowed
