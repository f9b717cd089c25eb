"""Masks that compose, and cost what their pairs cost.

    mask = SlidingWindow(255, 0) | SinkTokens(4)
    out = attention(query, key, value, mask=mask & Causal())

A mask says of a query and a key whether the one may attend to the other. Backends ask
it for whole chunks as well: of those that it forbids nothing is read, and in those that
it allows nothing is masked. No mask here makes an array of all pairs of tokens.

A position is what causality goes by: `i + query_offset` for query i, or as `alignment`
or `cum_seqlens_*` say; in decoding, positions count from the start of each sequence.
"""

from collections.abc import Callable, Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Integer
from typing_extensions import override

from ._config import FURTHEST, check_int, window_bounds
from ._jax import broadcast_shapes, pad, shape_of, switch, tree_map
from ._mask_picture import draw as draw, show as show, to_array as to_array
from ._typing import Window, int32
from .functional._checks import check_broadcasts, check_offsets
from .functional._function import Bound, own_function, probe
from .functional._layout import matrix
from .functional._mask import (
    AbstractMask as AbstractMask,
    And as And,
    Extent,
    Grid,
    LogitsShape,
    Not as Not,
    Or as Or,
)
from .functional._positions import Pairs, sequences
from .functional._tiles import Layout, Tile, take_each

_Batched = int | Integer[Array, "..."]


class Causal(AbstractMask):
    """A query sees the keys up to its own position, plus `offset`.

    **Arguments:**

    - `offset`: an int, or integers that broadcast to `*batch`, which may be traced. 0
        by default; 1 lets each query see one key more.
    """

    offset: _Batched = 0

    @override
    def bind(self, shape: LogitsShape) -> "Causal":
        """With one offset for each batch element."""
        return Causal(_per_element("Causal.offset", self.offset, shape))

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By distance."""
        return pairs.distance <= _over_pairs(self.offset)

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of the distance."""
        low, high = grid.distance
        offset = _over_chunks(self.offset)
        return Extent(low <= offset, high <= offset)


class SlidingWindow(AbstractMask):
    """A query sees keys that are near: `-left <= key's position - query's <= right`.

    (Beltagy et al. 2020, arXiv 2004.05150.)

    **Arguments:**

    - `left`, `right`: ints that are not negative, or None for unbounded.
    """

    left: int | None = eqx.field(static=True)
    right: int | None = eqx.field(static=True)

    def __init__(self, left: int | None, right: int | None) -> None:
        self.left, self.right = window_bounds((left, right))

    @property
    @override
    def is_local(self) -> bool:
        """It is if it is bounded on the left."""
        return self.left is not None

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By distance."""
        distance = pairs.distance
        allowed = jnp.ones((1,) * 5, bool)
        if self.right is not None:
            allowed = distance <= self.right
        if self.left is not None:
            near = distance >= -self.left
            allowed = near if self.right is None else allowed & near
        return allowed

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of the distance."""
        low, high = grid.distance
        extent = _everything(low)
        if self.right is not None:
            extent = extent & Extent(low <= self.right, high <= self.right)
        if self.left is not None:
            extent = extent & Extent(high >= -self.left, low >= -self.left)
        return extent


class Dilated(AbstractMask):
    """A sliding window with gaps: of `step` positions, only the first is seen.

    (Beltagy et al. 2020, arXiv 2004.05150.)

    **Arguments:**

    - `window`: how many keys are seen on each side beside the own position, one int or
        a pair `(left, right)`.
    - `step`: keys at distances that are multiples of this are seen; at least 1.
    """

    window: Window = eqx.field(static=True)
    step: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if None in window_bounds(self.window):
            raise ValueError(
                f"Dilated.window is {self.window}, but must be bounded on both sides"
            )
        _check_size("Dilated.step", self.step)

    @property
    @override
    def is_local(self) -> bool:
        """It is."""
        return True

    def _bounds(self) -> tuple[int, int]:
        left, right = window_bounds(self.window)
        assert left is not None and right is not None
        return min(left * self.step, FURTHEST), min(right * self.step, FURTHEST)

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By distance, and by the remainders of both positions."""
        left, right = self._bounds()
        distance = pairs.distance
        same = pairs.q_position % self.step == pairs.kv_position % self.step
        return (distance >= -left) & (distance <= right) & same

    @override
    def extent(self, grid: Grid) -> Extent:
        """Some if a multiple of `step` lies within the bounds of the distance."""
        left, right = self._bounds()
        low, high = grid.distance
        every = (low >= -left) & (high <= right) & (self.step == 1)
        low, high = jnp.maximum(low, -left), jnp.minimum(high, right)
        return Extent(high // self.step * self.step >= low, every)


class ChunkedLocal(AbstractMask):
    """A query sees the keys of its own stretch of `size` positions, as in Llama 4.

    **Arguments:**

    - `size`: how many positions, at least 1.
    """

    size: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        _check_size("ChunkedLocal.size", self.size)

    @property
    @override
    def is_local(self) -> bool:
        """It is."""
        return True

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By the number of the stretch."""
        return pairs.q_position // self.size == pairs.kv_position // self.size

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of that number."""
        q, kv = grid.q.position, grid.kv.position
        return _same(*(x // self.size for x in (*q, *kv)))


class PrefixLM(AbstractMask):
    """All see the first tokens; the rest is causal (Raffel et al. 2019, 1910.10683).

    **Arguments:**

    - `prefix_length`: an int, or integers that broadcast to `*batch`, which may be
        traced.
    """

    prefix_length: _Batched

    @override
    def bind(self, shape: LogitsShape) -> "PrefixLM":
        """With one length for each batch element."""
        return PrefixLM(
            _per_element("PrefixLM.prefix_length", self.prefix_length, shape)
        )

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By position."""
        in_prefix = pairs.kv_position < _over_pairs(self.prefix_length)
        return in_prefix | (pairs.distance <= 0)

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of positions and distance."""
        prefix, kv = _over_chunks(self.prefix_length), grid.kv.position
        low, high = grid.distance
        return Extent((kv.low < prefix) | (low <= 0), (kv.high < prefix) | (high <= 0))


class SinkTokens(AbstractMask):
    """All see the first tokens (Xiao et al. 2023, arXiv 2309.17453), and no others.

    To be joined with a window: `SlidingWindow(255, 0) | SinkTokens(4)`.

    **Arguments:**

    - `count`: how many, an int that is not negative.
    """

    count: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        check_int("SinkTokens.count", self.count)
        if self.count < 0:
            raise ValueError(
                f"SinkTokens.count is {self.count}, but must not be negative"
            )

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By position."""
        position = pairs.kv_position
        return (position >= 0) & (position < self.count)

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of the position."""
        low, high = grid.kv.position
        return Extent(
            (high >= 0) & (low < self.count), (low >= 0) & (high < self.count)
        )


class Padding(AbstractMask):
    """Keys are real up to a length: those at positions from it on are not seen.

    **Arguments:**

    - `lengths`: an int, or integers that broadcast to `*batch`, which may be traced.
    """

    lengths: _Batched

    @override
    def bind(self, shape: LogitsShape) -> "Padding":
        """With one length for each batch element."""
        return Padding(_per_element("Padding.lengths", self.lengths, shape))

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By position."""
        return pairs.kv_position < _over_pairs(self.lengths)

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of the position."""
        lengths, (low, high) = _over_chunks(self.lengths), grid.kv.position
        return Extent(low < lengths, high < lengths)


class Segments(AbstractMask):
    """Tokens with equal ids attend to each other. A negative id is padding.

    Padding sees nothing and nothing sees it.

    **Arguments:**

    - `q_ids`, `kv_ids`: integers, `*batch q_len` and `*batch kv_len`. `q_ids` alone
        serves both sides if these are of one length.
    """

    q_ids: Integer[Array, "..."]
    kv_ids: Integer[Array, "..."] | None = None

    @property
    @override
    def is_local(self) -> bool:
        """It is."""
        return True

    @override
    def bind(self, shape: LogitsShape) -> "Segments":
        """With ids for each token."""
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        return Segments(
            *(
                shape.per_element(name, int32(name, ids), length)
                for name, ids, length in (
                    ("Segments.q_ids", self.q_ids, shape.q_len),
                    ("Segments.kv_ids", kv_ids, shape.kv_len),
                )
            )
        )

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By id."""
        assert self.kv_ids is not None
        tile = pairs.tile
        q_ids = tile.over_queries(tile.of_queries(self.q_ids, fill=-1))
        kv_ids = tile.over_keys(tile.of_keys(self.kv_ids, fill=-1))
        return (q_ids == kv_ids) & (q_ids >= 0)

    @override
    def extent(self, grid: Grid) -> Extent:
        """By the bounds of the ids; padding is out of them, and no id is its own."""
        assert self.kv_ids is not None
        q, kv = grid.q.bounds(self.q_ids), grid.kv.bounds(self.kv_ids)
        extent = _same(*q, *kv)
        one = extent.every & (q.low >= 0)
        q_real, kv_real = (
            side.bounds(jnp.where(ids >= 0, ids, _NO_ID))
            for side, ids in ((grid.q, self.q_ids), (grid.kv, self.kv_ids))
        )
        return Extent((q_real.low <= kv.high) & (kv_real.low <= q.high), one)


class Documents(AbstractMask):
    """Documents packed one after the other: tokens see those of their own alone.

    **Arguments:**

    - `cum_seqlens_q`, `cum_seqlens_k`: integers, the offset of each document, from 0
        on, and the end of the last. Tokens past it are padding. `cum_seqlens_q` alone
        serves both sides if these are of one length.

    Positions stay those of the whole row; the arguments of that name of
    [`eqx_attention.attention`][] count them within each document.
    """

    cum_seqlens_q: Integer[Array, " offsets"]
    cum_seqlens_k: Integer[Array, " offsets"] | None = None

    @property
    @override
    def is_local(self) -> bool:
        """It is."""
        return True

    @staticmethod
    def from_cum_seqlens(
        cum_seqlens_q: Integer[Array, " offsets"],
        cum_seqlens_k: Integer[Array, " offsets"] | None = None,
    ) -> "Documents":
        """From offsets, as flash-attention has them."""
        return Documents(cum_seqlens_q, cum_seqlens_k)

    @staticmethod
    def from_lengths(lengths: Integer[Array, " documents"]) -> "Documents":
        """From the length of each document."""
        ends = jnp.cumsum(int32("lengths", lengths), dtype=jnp.int32)
        return Documents(pad(ends, [(1, 0)]))

    @override
    def bind(self, shape: LogitsShape) -> Segments:
        """As segments."""
        starts_k = self.cum_seqlens_k
        q_starts = check_offsets("cum_seqlens_q", self.cum_seqlens_q, shape.q_len)
        q_ids = sequences(q_starts, shape.q_len)[0][None]
        if starts_k is None:
            if shape.q_len != shape.kv_len:
                raise ValueError(
                    "Documents.cum_seqlens_k is missing: cum_seqlens_q alone serves "
                    "both sides only if query and key are of one length, and they are "
                    f"{shape.q_len} and {shape.kv_len}"
                )
            return Segments(q_ids, q_ids)
        kv_starts = check_offsets("cum_seqlens_k", starts_k, shape.kv_len)
        return Segments(q_ids, sequences(kv_starts, shape.kv_len)[0][None])

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """Bound, it is another mask."""
        raise NotImplementedError


class BlockSparse(AbstractMask):
    """Blocks of positions see blocks of positions, as a grid says.

    So BigBird's and MInference's patterns are written (Zaheer et al. 2020, arXiv
    2007.14062; Jiang et al. 2024, arXiv 2407.02490). A query beyond the grid sees
    nothing.

    **Arguments:**

    - `pattern`: bool, which may be traced, `*batch heads q_blocks kv_blocks`: whether
        position i sees position j is `pattern[..., i // block, j // block]`. The axis
        of heads is 1, kv_heads or q_heads, and may be left out, as may batch axes.
    - `block`: how many positions, at least 1. The grid covers all queries and keys.
    """

    pattern: Bool[Array, "..."]
    block: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        _check_size("BlockSparse.block", self.block)
        if self.pattern.ndim < 2:
            raise ValueError(
                f"BlockSparse.pattern has shape {self.pattern.shape}, but needs "
                "(*batch, heads, q_blocks, kv_blocks) or its last two axes"
            )

    @override
    def bind(self, shape: LogitsShape) -> "BlockSparse":
        """With all axes in place."""
        q_blocks, kv_blocks = self.pattern.shape[-2:]
        if q_blocks * self.block < shape.q_len or kv_blocks * self.block < shape.kv_len:
            raise ValueError(
                f"BlockSparse.pattern has {q_blocks} x {kv_blocks} blocks of "
                f"{self.block}, but {shape.q_len} queries and {shape.kv_len} keys need "
                f"{-(-shape.q_len // self.block)} x {-(-shape.kv_len // self.block)}"
            )
        logits = (*shape.batch, shape.q_heads, q_blocks, kv_blocks)
        check_broadcasts("BlockSparse.pattern", self.pattern, logits, shape.kv_heads)
        pattern = matrix(self.pattern, shape.batch, shape.q_heads, shape.kv_heads)
        assert pattern is not None
        return BlockSparse(pattern, self.block)

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """By the block of each position, first of the queries, then of the keys."""
        tile = pairs.tile
        pattern = tile.cut_heads(self.pattern)
        rows = take_each(
            pattern, pairs.q_positions.at(tile.q_start, tile.q_size) // self.block, 3
        )
        columns = pairs.kv_positions.at(tile.kv_start, tile.kv_size) // self.block
        return tile.arrange(take_each(rows, columns, 4))

    @override
    def extent(self, grid: Grid) -> Extent:
        """By how many blocks of a rectangle are allowed, told by sums from a corner."""
        sums = jnp.cumsum(
            jnp.cumsum(self.pattern, axis=3, dtype=jnp.int32), axis=4, dtype=jnp.int32
        )
        sums = pad(sums, [(0, 0)] * 3 + [(1, 0), (1, 0)])
        ends: list[tuple[Array, Array]] = []
        inside = jnp.asarray(True)
        for side, blocks in (
            (grid.q, self.pattern.shape[3]),
            (grid.kv, self.pattern.shape[4]),
        ):
            low, high = (x // self.block for x in side.position)
            inside = inside & ((low >= 0) & (high < blocks))
            ends.append((jnp.clip(low, 0, blocks), jnp.clip(high + 1, 0, blocks)))

        def corner(q: Array, kv: Array) -> Array:
            batch, chunks = broadcast_shapes(q.shape, kv.shape)[::2]
            q, kv = (jnp.broadcast_to(x, (batch, 1, chunks))[:, 0] for x in (q, kv))
            table = jnp.broadcast_to(sums, (batch, *sums.shape[1:]))

            def at(table: Array, q: Array, kv: Array) -> Array:
                return table[:, :, q, kv]

            return jax.vmap(at)(table, q, kv)  # batch kv_heads group chunks

        (q_low, q_high), (kv_low, kv_high) = ends
        allowed = corner(q_high, kv_high) - corner(q_low, kv_high)
        allowed = allowed - corner(q_high, kv_low) + corner(q_low, kv_low)
        area = ((q_high - q_low) * (kv_high - kv_low))[:, :, None]
        return Extent(
            jnp.any(allowed > 0, axis=2),
            jnp.all(allowed == area, axis=2) & inside,
        )


class Dense(AbstractMask):
    """An array of all pairs, as given to `mask` itself.

    **Arguments:**

    - `array`: bool or integer, broadcastable to `*batch q_heads q_len kv_len`, its head
        axis 1, kv_heads or q_heads. A pair may attend where it is True (not 0).
    """

    array: Bool[Array, "..."] | Integer[Array, "..."]

    @override
    def bind(self, shape: LogitsShape) -> "Dense":
        """With all axes in place."""
        logits = (*shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
        check_broadcasts("mask", self.array, logits, shape.kv_heads)
        array = matrix(self.array, shape.batch, shape.q_heads, shape.kv_heads)
        assert array is not None
        return Dense(array)

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """The tile's part."""
        tile = pairs.tile
        return tile.arrange(tile.cut(self.array, fill=0).astype(bool))

    @override
    def extent(self, grid: Grid) -> Extent:
        """By all pairs of the one chunk, in one go."""
        return grid.by_chunk(self.tile(grid.pairs(None)))


class Rule(AbstractMask):
    """A function of one's own says which pairs may attend.

    **Arguments:**

    - `fn`: called as `fn(batch, head, q_position, kv_position)`, four int32 arrays that
        broadcast against each other; returns bools that broadcast to all of them. It
        has to treat each pair alone. Arrays that it needs are fields: then `fn` is an
        `eqx.Module` with a `__call__`. Those may be traced. A plain function is part of
        the compiled program: define it once, as a new one compiles anew.

    What a rule says of chunks is found by trying all of their pairs.
    """

    fn: Callable[[Array, Array, Array, Array], Array]

    def __init__(self, fn: Callable[[Array, Array, Array, Array], Array]) -> None:
        self.fn = own_function("Rule.fn", fn)

    @override
    def __repr__(self) -> str:
        return f"Rule({self.fn!r})"

    @override
    def bind(self, shape: LogitsShape) -> "AbstractMask":
        """With what is known of its results."""
        function = Bound.of(self.fn)
        sizes = (2, 3, 5, 7, 11)  # told apart, so that it shows what they depend on
        out = probe(
            "Rule.fn",
            function,
            *(
                jax.ShapeDtypeStruct(_only(sizes, axes), jnp.int32)
                for axes in ((0,), (1, 2), (3,), (4,))
            ),
        )
        if out.dtype != jnp.bool_:
            raise TypeError(f"Rule.fn returned {out.dtype}, but must return bool")
        if any(
            n not in (1, size)
            for n, size in zip(out.shape[::-1], sizes[::-1], strict=False)
        ) or (len(out.shape) > 5):
            raise ValueError(
                f"Rule.fn returned shape {out.shape} for arguments that broadcast to "
                f"{sizes}, but must return one bool for each pair, or one for many"
            )
        whole = (1,) * (5 - len(out.shape)) + out.shape
        size = max(1, _size(shape.batch)) if whole[0] > 1 else 1
        return _BoundRule(function, jnp.arange(size, dtype=jnp.int32))

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """Bound, it is another mask."""
        raise NotImplementedError


class _BoundRule(AbstractMask):
    """A rule, and the number of each batch element; one number if it asks for none."""

    function: Bound
    batch: Int[Array, " batch"]

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        batch = self.batch[:, None, None, None, None]
        out = self.function(
            batch, pairs.tile.heads, pairs.q_position, pairs.kv_position
        )
        return out.reshape((1,) * (5 - out.ndim) + out.shape)


class PerHead(AbstractMask):
    """A mask for each query head.

    **Arguments:**

    - `masks`: a sequence of as many masks as there are query heads.
    """

    masks: tuple[AbstractMask, ...]

    def __init__(self, masks: Sequence[AbstractMask]) -> None:
        self.masks = tuple(masks)

    @override
    def bind(self, shape: LogitsShape) -> "PerHead":
        """Binds each."""
        if len(self.masks) != shape.q_heads:
            raise ValueError(
                f"PerHead has {len(self.masks)} masks, but query has {shape.q_heads} "
                "heads"
            )
        return PerHead([mask.bind(shape) for mask in self.masks])

    @override
    def tile(self, pairs: Pairs) -> Bool[Array, "..."]:
        """Each head by its own mask."""
        tile = pairs.tile
        heads = [
            self._head(kv_head, place, pairs)
            for kv_head in range(tile.kv_heads)
            for place in range(tile.group)
        ]
        shape = broadcast_shapes(*(x.shape for x in heads))
        heads = [jnp.broadcast_to(x, shape) for x in heads]
        groups = [
            jnp.concatenate(heads[i : i + tile.group], axis=_group_axis(tile))
            for i in range(0, len(heads), tile.group)
        ]
        return jnp.concatenate(groups, axis=1)

    def _head(self, kv_head: int, place: int, pairs: Pairs) -> Bool[Array, "..."]:
        """One head of the tile."""
        tile = pairs.tile
        own = Pairs(tile.one_head(kv_head), pairs.q_positions, pairs.kv_positions)
        head = kv_head * tile.group + place

        def by(mask: AbstractMask) -> Bool[Array, "..."]:
            return _pick(mask.tile(own), place, _group_axis(tile))

        if tile.kv_heads * tile.group == len(self.masks):
            return by(self.masks[head])
        first = tile.head_start * tile.group
        each = [partial(by, mask) for mask in self.masks]
        shape = broadcast_shapes(*(shape_of(own) for own in each))

        def branch(own: Callable[[], Array]) -> Callable[[], Array]:
            return lambda: jnp.broadcast_to(own(), shape)

        return switch(first + head, [branch(own) for own in each])

    @override
    def extent(self, grid: Grid) -> Extent:
        """Of a key head: some if some of its group, every if every of all of it."""
        heads: list[Extent] = []
        for kv_head in range(grid.kv_heads):
            first = kv_head * grid.group
            own = [
                _of_head(mask.extent(grid), kv_head)
                for mask in self.masks[first : first + grid.group]
            ]
            together = own[0]
            for extent in own[1:]:
                together = Extent(
                    together.some | extent.some, together.every & extent.every
                )
            heads.append(together)
        batch = max(x.some.shape[0] for x in heads)
        some, every = (
            jnp.concatenate(
                [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in xs], axis=1
            )
            for xs in ([x.some for x in heads], [x.every for x in heads])
        )
        return Extent(some, every)


_NO_ID = FURTHEST


def _check_size(name: str, size: int) -> None:
    check_int(name, size)
    if size < 1:
        raise ValueError(f"{name} is {size}, but must be at least 1")


def _per_element(name: str, x: _Batched, shape: LogitsShape) -> Int[Array, " batch"]:
    """Integers for each batch element. None is further away than any token can be."""
    if not isinstance(x, Array):
        check_int(name, x)
        return jnp.full(1, max(-FURTHEST, min(x, FURTHEST)), jnp.int32)
    limits = jnp.iinfo(x.dtype)
    x = jnp.clip(x, max(-FURTHEST, limits.min), min(FURTHEST, limits.max))
    return shape.per_element(name, x.astype(jnp.int32))


def _over_pairs(x: _Batched) -> Int[Array, "batch 1 1 1 1"]:
    """A number for each batch element, to broadcast over a tile."""
    return jnp.asarray(x)[:, None, None, None, None]


def _over_chunks(x: _Batched) -> Int[Array, "batch 1 1"]:
    """A number for each batch element, to broadcast over chunks."""
    return jnp.asarray(x)[:, None, None]


def _everything(like: Array) -> Extent:
    return Extent(jnp.ones(like.shape, bool), jnp.ones(like.shape, bool))


def _same(q_low: Array, q_high: Array, kv_low: Array, kv_high: Array) -> Extent:
    """Of chunks whose tokens attend if a number of theirs is the same."""
    return Extent(
        (q_low <= kv_high) & (kv_low <= q_high),
        (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low),
    )


def _only(sizes: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n if i in axes else 1 for i, n in enumerate(sizes))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _pick(x: Array, index: int, axis: int) -> Array:
    """One entry along an axis, which stays; an axis of 1 has it already."""
    return x if x.shape[axis] == 1 else lax.slice_in_dim(x, index, index + 1, axis=axis)


def _of_head(extent: Extent, kv_head: int) -> Extent:
    """The extent of one key head."""
    return tree_map(lambda x: _pick(x, kv_head, 1), extent)


def _group_axis(tile: Tile) -> int:
    """Where a tile has the query heads that share a key head."""
    return 2 if tile.layout is Layout.KEYS_MINOR else 3
