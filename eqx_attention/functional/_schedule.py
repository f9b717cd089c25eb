"""Which pairs of a query chunk and a key chunk hold work, and the walk over them.

Each pair of chunks has none, some or all of its pairs of tokens allowed. A mask tells
that from the bounds of the chunks' positions and ids: a few comparisons for a pair of
chunks, made for one chunk against all others at a time, so nothing grows with the
square of the length. A walk then visits the chunks with all pairs allowed, where no
mask is made, and after them those with some. The rest is never read.
"""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._jax import fori_loop, tree_map
from ..masks import Dense
from ._mask import AbstractMask, Extent, Grid, Side, intersection
from ._score import ScoreParameters
from ._tiles import Layout, Tile, read_chunk
from ._visibility import Visibility

_Carry = TypeVar("_Carry")


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


class Schedule(eqx.Module):
    """Makes the plan of one chunk of queries, or of one chunk of keys."""

    visibility: Visibility
    parameters: ScoreParameters
    kv_heads: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    q_size: int = eqx.field(static=True)
    kv_size: int = eqx.field(static=True)

    @property
    def q_chunks(self) -> int:
        """How many chunks of queries there are."""
        return -(-self.visibility.q_len // self.q_size)

    @property
    def kv_chunks(self) -> int:
        """How many chunks of keys there are."""
        return -(-self.visibility.kv_len // self.kv_size)

    def keys_for(self, q_chunk: Int[Array, ""]) -> "Plans":
        """The key chunks that one chunk of queries has to visit."""
        return Plans(self._extent(q_chunk, None), self.kv_chunks)

    def queries_for(self, kv_chunk: Int[Array, ""]) -> "Plans":
        """The query chunks that have to visit one chunk of keys."""
        return Plans(self._extent(None, kv_chunk), self.q_chunks)

    def deal(self, q_chunk: Int[Array, ""], *, batch: int, lanes: int) -> Deal:
        """The key chunks that one chunk of queries has to visit, each sequence its own.

        They are dealt out to at most `lanes` lanes.
        """
        shape = batch, self.kv_chunks
        some = every = jnp.ones(shape, bool)
        extent = self._extent(q_chunk, None)
        if extent is not None:
            some = jnp.broadcast_to(jnp.any(extent.some, axis=1), shape)
            every = jnp.broadcast_to(jnp.all(extent.every, axis=1), shape) & some
        order = _ranked(some.ravel(), every.ravel())
        return Deal(
            sequence=order // self.kv_chunks,
            chunk=order % self.kv_chunks,
            num_full=jnp.sum(every, dtype=jnp.int32),
            num_work=jnp.sum(some, dtype=jnp.int32),
            lanes=min(lanes, batch * self.kv_chunks),
        )

    def _extent(
        self, q_chunk: Int[Array, ""] | None, kv_chunk: Int[Array, ""] | None
    ) -> Extent | None:
        """How much of each pair of chunks is allowed; None if all is."""
        rule = self.visibility
        mask = intersection(rule.mask, self._finite())
        grid = Grid(
            Side(rule.q_positions, q_chunk, rule.q_len, self.q_size),
            Side(rule.kv_positions, kv_chunk, rule.kv_len, self.kv_size),
            self.kv_heads,
            self.group,
        )
        extent = None if mask is None else mask.extent(grid)
        if rule.kv_len % self.kv_size == 0:
            return extent
        # The last chunk of keys is filled up.
        whole = grid.kv.index.high < rule.kv_len
        ends = Extent(jnp.ones_like(whole), whole)
        return ends if extent is None else extent & ends

    def _finite(self) -> AbstractMask | None:
        """What the score does not forbid by minus infinity.

        Of all pairs at once: XLA takes that out of the loop over chunks, for which else
        it would copy the whole bias.
        """
        zero = jnp.int32(0)
        tile = Tile(
            *(zero, zero, zero, self.kv_heads, self.group),
            *(self.visibility.q_len, self.visibility.kv_len),
            Layout.KEYS_MINOR,
        )
        allowed = self.parameters.allowed(tile)
        return None if allowed is None else Dense(allowed)


class Plans(eqx.Module):
    """The plans of one chunk: the same for all heads, or one for some of them."""

    extent: Extent | None
    shared: Plan | None
    count: int = eqx.field(static=True)

    def __init__(self, extent: Extent | None, count: int) -> None:
        self.extent, self.count = extent, count
        # Made once where it can be, and not within a loop over heads.
        differ = extent is not None and extent.by_head
        self.shared = None if differ else self._plan(extent)

    def of(self, head_start: Int[Array, ""], kv_heads: int) -> Plan:
        """The plan of `kv_heads` key heads from `head_start` on."""
        if self.shared is not None:
            return self.shared
        return self._plan(
            tree_map(
                lambda x: read_chunk(x, head_start, kv_heads, axis=1, fill=0),
                self.extent,
            )
        )

    def _plan(self, extent: Extent | None) -> Plan:
        if extent is None:
            count = jnp.int32(self.count)
            return Plan(None, count, count)
        shape = (self.count,)
        some = jnp.broadcast_to(jnp.any(extent.some, axis=(0, 1)), shape)
        every = jnp.broadcast_to(jnp.all(extent.every, axis=(0, 1)), shape) & some
        num_full = jnp.sum(every, dtype=jnp.int32)
        return Plan(_ranked(some, every), num_full, jnp.sum(some, dtype=jnp.int32))


def _ranked(
    some: Bool[Array, " chunks"], every: Bool[Array, " chunks"]
) -> Int[Array, " chunks"]:
    """The chunks: first those that hold all pairs, then those with some, then none."""
    rank = jnp.where(every, 0, jnp.where(some, 1, 2))
    return jnp.argsort(rank).astype(jnp.int32)
