"""Where decoding finds keys and values: one block of one sequence at a time."""

import math
from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, Shaped

from ._layout import keys_by_head
from ._store import Store
from ._tiles import read_chunk, shift


class ContiguousCache(eqx.Module):
    """The keys and values of each sequence in a row of its own."""

    key: Store
    value: Store
    block_size: int = eqx.field(static=True)

    @staticmethod
    def of(
        key: Float[Array, "*batch capacity kv_heads qk_dim"],
        value: Float[Array, "*batch capacity kv_heads v_dim"],
        block_size: int,
    ) -> "ContiguousCache":
        """With the batch axes made one."""
        return ContiguousCache(
            Store(one_batch(key), None), Store(one_batch(value), None), block_size
        )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key.data.shape[-2]

    @property
    def qk_dim(self) -> int:
        """The width of a key."""
        return self.key.data.shape[-1]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        return self.key.data.shape[1]

    def block(
        self, sequence: Int[Array, ""], block: Int[Array, ""]
    ) -> tuple[
        Float[Array, "1 size kv_heads qk_dim"], Float[Array, "1 size kv_heads v_dim"]
    ]:
        """Keys and values of one block, as they lie there."""
        size, start = self.block_size, block * self.block_size
        # In one step, so that no row of a cache is ever copied.
        first = jnp.minimum(start, self.capacity - size)

        def get(x: Array, at: tuple[Array, Array]) -> Array:
            zeros = (jnp.int32(0),) * (x.ndim - 2)
            return lax.dynamic_slice(x, (*at, *zeros), (1, size, *x.shape[2:]))

        def read(x: Store) -> Array:
            rows = x.read(get, (sequence, first))
            if self.capacity % size == 0:
                return rows
            return shift(rows, start - first, axis=1, fill=0.0)

        return read(self.key), read(self.value)

    def contents(
        self,
    ) -> tuple[
        Float[Array, "batch kv_heads capacity qk_dim"],
        Float[Array, "batch kv_heads capacity v_dim"],
    ]:
        """All keys and values, heads first."""

        def read(x: Store) -> Array:
            return keys_by_head(x.read_all(lambda x, _: x, ()))

        return read(self.key), read(self.value)


class PagedCache(eqx.Module):
    """Keys and values in pages; a sequence's pages are listed in its row of a table.

    (Kwon et al. 2023, arXiv 2309.06180.) A block is a few pages that stand next to each
    other in the table.
    """

    key_pages: Store
    value_pages: Store
    page_table: Integer[Array, "batch max_pages"]
    block_size: int = eqx.field(static=True)

    @staticmethod
    def of(
        key_pages: Store,
        value_pages: Store,
        page_table: Integer[Array, "*batch max_pages"],
        block_size: int,
    ) -> "PagedCache":
        """With the batch axes of the table made one, and whole pages in a block."""
        table = page_table.reshape(
            math.prod(page_table.shape[:-1]), page_table.shape[-1]
        )
        page_size = key_pages.data.shape[1]
        pages_per_block = max(1, min(block_size // page_size, table.shape[1]))
        return PagedCache(
            key_pages,
            value_pages,
            table.astype(jnp.int32),
            pages_per_block * page_size,
        )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_pages.data.shape[-2]

    @property
    def qk_dim(self) -> int:
        """The width of a key."""
        return self.key_pages.data.shape[-1]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        return self.page_table.shape[1] * self.key_pages.data.shape[1]

    def block(
        self, sequence: Int[Array, ""], block: Int[Array, ""]
    ) -> tuple[
        Float[Array, "1 size kv_heads qk_dim"], Float[Array, "1 size kv_heads v_dim"]
    ]:
        """Keys and values of one block, as they lie there."""
        row = lax.dynamic_slice_in_dim(self.page_table, sequence, 1, axis=0)
        count = self.block_size // self.key_pages.data.shape[1]
        pages = read_chunk(row, block * count, count, axis=1, fill=0)

        def read(x: Store) -> Array:
            return _in_a_row(x.read(_gather, pages))

        return read(self.key_pages), read(self.value_pages)

    def contents(
        self,
    ) -> tuple[
        Float[Array, "batch kv_heads capacity qk_dim"],
        Float[Array, "batch kv_heads capacity v_dim"],
    ]:
        """All keys and values, heads first; unused entries of the table hold any."""

        def read(x: Store) -> Array:
            return keys_by_head(_in_a_row(x.read_all(_gather, self.page_table)))

        return read(self.key_pages), read(self.value_pages)


def _gather(
    pages: Array, table: Integer[Array, "batch count"]
) -> Shaped[Array, "batch count ..."]:
    # Unused entries may be any number: what they bring in has no weight.
    index = jnp.clip(table, 0, pages.shape[0] - 1)
    return jnp.take(pages, index, axis=0, mode="clip")


def _in_a_row(
    pages: Float[Array, "batch count page_size kv_heads dim"],
) -> Float[Array, "batch size kv_heads dim"]:
    return pages.reshape(
        pages.shape[0], pages.shape[1] * pages.shape[2], *pages.shape[3:]
    )


Cache: TypeAlias = ContiguousCache | PagedCache


def one_batch(x: Float[Array, "*batch capacity kv_heads dim"]) -> Array:
    """One batch axis in place of any number."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
