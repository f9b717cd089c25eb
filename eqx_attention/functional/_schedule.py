"""Which pairs of a query chunk and a key chunk hold work, and the walk over them.

Each pair of chunks has none, some or all of its pairs of tokens allowed. That is told
from the bounds of the chunks' positions and segment ids: a few comparisons for a pair
of chunks, made for one chunk against all others at a time, so nothing grows with the
square of the length. A walk then visits the chunks with all pairs allowed, where no
mask is made, and after them those with some. The rest is never read.
"""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._jax import fori_loop, pad, tree_map
from ._tiles import read_chunk
from ._visibility import Positions, Visibility

_Carry = TypeVar("_Carry")
_FAR = int(np.iinfo(np.int32).max) // 2


class Plan(eqx.Module):
    """The chunks to visit: first `num_full` that hold all pairs, then those with some.

    None in place of an order means all chunks, each with all of its pairs.
    """

    order: Int[Array, " chunks"] | None
    num_full: Int[Array, ""]
    num_work: Int[Array, ""]

    def walk(
        self,
        visit: Callable[[Int[Array, ""], _Carry, bool], _Carry],
        carry: _Carry,
    ) -> _Carry:
        """Folds `visit(chunk, carry, masked)` over the chunks that hold work."""
        order = self.order
        if order is None:
            return fori_loop(
                jnp.int32(0),
                self.num_work,
                lambda i, carry: visit(i, carry, False),
                carry,
            )
        carry = fori_loop(
            jnp.int32(0),
            self.num_full,
            lambda i, carry: visit(order[i], carry, False),
            carry,
        )
        return fori_loop(
            self.num_full,
            self.num_work,
            lambda i, carry: visit(order[i], carry, True),
            carry,
        )


class Deal(eqx.Module):
    """The chunks of keys that hold work, of all sequences, dealt out to lanes.

    First `num_full` that hold all pairs, then those with some, up to `num_work`. Lanes
    run side by side, and each gets as many chunks as the others, however different the
    sequences are in length: so one sequence may be split among several lanes.
    """

    sequence: Int[Array, " chunks"]
    chunk: Int[Array, " chunks"]
    num_full: Int[Array, ""]
    num_work: Int[Array, ""]
    lanes: int = eqx.field(static=True)

    def walk(
        self,
        visit: Callable[
            [Int[Array, ""], Int[Array, ""], Bool[Array, ""] | None, _Carry], _Carry
        ],
        carry: _Carry,
    ) -> _Carry:
        """Folds `visit(sequence, chunk, active, carry)` over the chunks of each lane.

        `active` is None if all pairs of the chunk are allowed. It is False if the lane
        has none left: then nothing is to be seen. All lanes start from `carry`, and
        what they end with is stacked.
        """
        # Of the full chunks, those that do not come out even go with the others.
        full_rounds = self.num_full // self.lanes
        dealt = full_rounds * self.lanes
        more_rounds = -((dealt - self.num_work) // self.lanes)

        def walk_lane(lane: Int[Array, ""]) -> _Carry:
            def full(i: Int[Array, ""], carry: _Carry) -> _Carry:
                place = lane * full_rounds + i
                return visit(self.sequence[place], self.chunk[place], None, carry)

            def partial(i: Int[Array, ""], carry: _Carry) -> _Carry:
                place = dealt + lane * more_rounds + i
                active = place < self.num_work
                place = jnp.minimum(place, self.num_work - 1)
                return visit(self.sequence[place], self.chunk[place], active, carry)

            zero = jnp.int32(0)
            after_full = fori_loop(zero, full_rounds, full, carry)
            return fori_loop(zero, more_rounds, partial, after_full)

        if self.lanes == 1:  # slices, where `vmap` would make gathers of them
            return tree_map(lambda x: x[None], walk_lane(jnp.int32(0)))
        return jax.vmap(walk_lane)(jnp.arange(self.lanes, dtype=jnp.int32))


class Bounds(eqx.Module):
    """What is known of the tokens of each chunk: the last axis counts chunks."""

    position_low: Int[Array, "#batch chunks"]
    position_high: Int[Array, "#batch chunks"]
    segment_low: Int[Array, "#batch chunks"] | None
    segment_high: Int[Array, "#batch chunks"] | None
    one_segment: Bool[Array, "#batch chunks"] | None

    def __init__(
        self,
        positions: Positions,
        segment_ids: Int[Array, "#batch length"] | None,
        size: int,
        count: int,
    ) -> None:
        if positions.within is None:
            low = size * jnp.arange(count, dtype=jnp.int32)[None]
            high = low + (size - 1)
        else:
            low = chunkwise(jnp.min, positions.within, size, count, fill=_FAR)
            high = chunkwise(jnp.max, positions.within, size, count, fill=-_FAR)
        self.position_low = low + positions.offset[:, None]
        self.position_high = high + positions.offset[:, None]
        self.segment_low = self.segment_high = self.one_segment = None
        if segment_ids is not None:
            real = jnp.where(segment_ids >= 0, segment_ids, _FAR)
            self.segment_low = chunkwise(jnp.min, real, size, count, fill=_FAR)
            self.segment_high = chunkwise(jnp.max, segment_ids, size, count, fill=-1)
            lowest = chunkwise(jnp.min, segment_ids, size, count, fill=-1)
            self.one_segment = (lowest == self.segment_high) & (lowest >= 0)

    def only(self, chunk: Int[Array, ""]) -> "Bounds":
        """The bounds of one chunk, to broadcast against those of all others."""
        return tree_map(lambda x: lax.dynamic_slice_in_dim(x, chunk, 1, axis=1), self)


class Schedule(eqx.Module):
    """Makes the plan of one chunk of queries, or of one chunk of keys."""

    visibility: Visibility
    bias: Float[Array, "..."] | None
    q_bounds: Bounds
    kv_bounds: Bounds
    q_size: int = eqx.field(static=True)
    kv_size: int = eqx.field(static=True)
    q_chunks: int = eqx.field(static=True)
    kv_chunks: int = eqx.field(static=True)

    def __init__(
        self,
        visibility: Visibility,
        bias: Float[Array, "..."] | None,
        q_len: int,
        q_size: int,
        kv_size: int,
    ) -> None:
        self.visibility, self.bias = visibility, bias
        self.q_size, self.kv_size = q_size, kv_size
        self.q_chunks = -(-q_len // q_size)
        self.kv_chunks = -(-visibility.kv_len // kv_size)
        q_ids, kv_ids = visibility.segments or (None, None)
        self.q_bounds = Bounds(visibility.q_positions, q_ids, q_size, self.q_chunks)
        self.kv_bounds = Bounds(
            visibility.kv_positions, kv_ids, kv_size, self.kv_chunks
        )

    def keys_for(self, q_chunk: Int[Array, ""]) -> Plan:
        """The key chunks that one chunk of queries has to visit."""
        return self._plan(*self._keys_for(q_chunk))

    def deal(self, q_chunk: Int[Array, ""], *, batch: int, lanes: int) -> Deal:
        """The key chunks that one chunk of queries has to visit, each sequence its own.

        They are dealt out to at most `lanes` lanes.
        """
        some, every = self._keys_for(q_chunk)
        shape = batch, self.kv_chunks
        some, every = jnp.broadcast_to(some, shape), jnp.broadcast_to(every, shape)
        every = every & some
        order = _ranked(some.ravel(), every.ravel())
        return Deal(
            sequence=order // self.kv_chunks,
            chunk=order % self.kv_chunks,
            num_full=jnp.sum(every, dtype=jnp.int32),
            num_work=jnp.sum(some, dtype=jnp.int32),
            lanes=min(lanes, batch * self.kv_chunks),
        )

    def _keys_for(
        self, q_chunk: Int[Array, ""]
    ) -> tuple[Bool[Array, "#batch chunks"], Bool[Array, "#batch chunks"]]:
        """Whether some, and whether all, pairs with the keys of a chunk are allowed."""
        some, every = self._by_bounds(self.q_bounds.only(q_chunk), self.kv_bounds)
        in_some, in_every = self._in_kv_range(
            jnp.arange(self.kv_chunks, dtype=jnp.int32)
        )
        some, every = some & in_some, every & in_every
        for allowed in self._dense():
            rows = read_chunk(
                allowed, q_chunk * self.q_size, self.q_size, axis=3, fill=False
            )
            some = some & _by_chunk(jnp.any, rows, 4, self.kv_size, self.kv_chunks)
            every = every & _by_chunk(jnp.all, rows, 4, self.kv_size, self.kv_chunks)
        return some, every

    def queries_for(self, kv_chunk: Int[Array, ""]) -> Plan:
        """The query chunks that have to visit one chunk of keys."""
        some, every = self._by_bounds(self.q_bounds, self.kv_bounds.only(kv_chunk))
        in_some, in_every = self._in_kv_range(kv_chunk[None])
        some, every = some & in_some, every & in_every
        for allowed in self._dense():
            columns = read_chunk(
                allowed, kv_chunk * self.kv_size, self.kv_size, axis=4, fill=False
            )
            some = some & _by_chunk(jnp.any, columns, 3, self.q_size, self.q_chunks)
            every = every & _by_chunk(jnp.all, columns, 3, self.q_size, self.q_chunks)
        return self._plan(some, every)

    def _plan(
        self, some: Bool[Array, "batch chunks"], every: Bool[Array, "batch chunks"]
    ) -> Plan:
        some, every = jnp.any(some, axis=0), jnp.all(every, axis=0)
        every = some & every
        num_full = jnp.sum(every, dtype=jnp.int32)
        num_work = jnp.sum(some, dtype=jnp.int32)
        if self.visibility.unrestricted and self.bias is None and not self._ragged:
            return Plan(None, num_full, num_work)
        return Plan(_ranked(some, every), num_full, num_work)

    @property
    def _ragged(self) -> bool:
        return self.visibility.kv_len % self.kv_size != 0

    def _in_kv_range(
        self, kv_chunk: Int[Array, " chunks"]
    ) -> tuple[Bool[Array, "batch chunks"], Bool[Array, "batch chunks"]]:
        kv_range = self.visibility.kv_range
        if kv_range is None:
            start, end = (
                jnp.zeros(1, jnp.int32),
                jnp.full(1, self.visibility.kv_len, jnp.int32),
            )
        else:
            start, end = kv_range
        first = (kv_chunk * self.kv_size)[None]
        after = first + self.kv_size
        start, end = start[:, None], end[:, None]
        return (after > start) & (first < end), (first >= start) & (after <= end)

    def _by_bounds(
        self, q: Bounds, kv: Bounds
    ) -> tuple[Bool[Array, "batch chunks"], Bool[Array, "batch chunks"]]:
        """Whether any, and whether each, pair of tokens may be allowed."""
        rule = self.visibility
        low = kv.position_low - q.position_high
        high = kv.position_high - q.position_low
        some = every = jnp.ones(low.shape, bool)
        if rule.right is not None:
            some, every = some & (low <= rule.right), every & (high <= rule.right)
        if rule.left is not None:
            near, all_near = high >= -rule.left, low >= -rule.left
            if rule.num_sink_tokens > 0:
                near = near | (kv.position_low < rule.num_sink_tokens)
                all_near = all_near | (kv.position_high < rule.num_sink_tokens)
            some, every = some & near, every & all_near
        if q.segment_low is not None and kv.segment_low is not None:
            assert q.segment_high is not None and kv.segment_high is not None
            assert q.one_segment is not None and kv.one_segment is not None
            meet = (q.segment_low <= kv.segment_high) & (
                kv.segment_low <= q.segment_high
            )
            same = q.one_segment & kv.one_segment & (q.segment_low == kv.segment_low)
            some, every = some & meet, every & same
        return some, every

    def _dense(self) -> list[Bool[Array, "..."]]:
        """The matrices that forbid pairs, as the caller made them."""
        dense: list[Array] = []
        if self.visibility.mask is not None:
            dense.append(self.visibility.mask.astype(bool))
        if self.bias is not None:
            dense.append(self.bias != -jnp.inf)
        return dense


def _ranked(
    some: Bool[Array, " chunks"], every: Bool[Array, " chunks"]
) -> Int[Array, " chunks"]:
    """The chunks: first those that hold all pairs, then those with some, then none."""
    rank = jnp.where(every, 0, jnp.where(some, 1, 2))
    return jnp.argsort(rank).astype(jnp.int32)


def chunkwise(
    reduce: Callable[..., Array],
    x: Int[Array, "#batch length"],
    size: int,
    count: int,
    *,
    fill: int,
) -> Int[Array, "#batch {count}"]:
    """`reduce` over each chunk of the last axis, whose end is filled up."""
    missing = count * size - x.shape[-1]
    x = pad(x, ((0, 0), (0, missing)), fill=fill)
    return reduce(x.reshape(x.shape[0], count, size), axis=-1)


def _by_chunk(
    reduce: Callable[..., Array],
    allowed: Bool[Array, "batch kv_heads group rows columns"],
    axis: int,
    size: int,
    count: int,
) -> Bool[Array, "batch chunks"]:
    """`reduce` over all axes but the batch, chunk by chunk along `axis`."""
    if allowed.shape[axis] == 1:
        return reduce(allowed, axis=(1, 2, 3, 4))[:, None]
    widths = [(0, 0)] * 5
    widths[axis] = (0, count * size - allowed.shape[axis])
    allowed = pad(allowed, widths)
    split = (*allowed.shape[:axis], count, size, *allowed.shape[axis + 1 :])
    return reduce(
        allowed.reshape(split), axis=tuple(i for i in range(1, 6) if i != axis)
    )
