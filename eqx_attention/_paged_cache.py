"""A cache in pages, which sequences take as they grow, share, and give back."""

import dataclasses
from typing import TypeAlias, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import (
    Array,
    Bool,
    DTypeLike,
    Float,
    Float32,
    Int,
    Int8,
    Int32,
    Integer,
)
from typing_extensions import override

from ._cache_base import AbstractKVCache, check_rows, check_sizes, token_counts
from ._config import check_int
from ._typing import check_values, checked, int32
from .functional._caches import PagedCache
from .functional._decode_inputs import DecodeInputs
from .functional._options import ScoreOptions
from .functional._store import Store

_KeyPages: TypeAlias = (
    Float[Array, "num_pages page_size kv_heads qk_dim"]
    | Int8[Array, "num_pages page_size kv_heads qk_dim"]
)
_ValuePages: TypeAlias = (
    Float[Array, "num_pages page_size kv_heads v_dim"]
    | Int8[Array, "num_pages page_size kv_heads v_dim"]
)
_PageScales: TypeAlias = Float32[Array, "num_pages page_size kv_heads"]
_Sequence: TypeAlias = int | Integer[Array, ""]
_NO_PAGE = -1


@final
class PagedKVCache(AbstractKVCache):
    """The keys and values of a batch of sequences, in pages that belong to all of them.

    (Kwon et al. 2023, arXiv 2309.06180.) `append` takes free pages, `free` gives those
    of a sequence back, and `share` lets one sequence begin with the pages of another. A
    page that several refer to is copied before one of them writes to it.

    **Fields:**

    - `key_pages`, `value_pages`: `num_pages page_size kv_heads qk_dim` and `num_pages
        page_size kv_heads v_dim`.
    - `page_table`: int32 `batch max_pages`: the pages of each sequence in order; -1
        where it has none.
    - `lengths`: int32 `batch`: how many tokens each sequence has. These are what
        [`eqx_attention.paged_decode_attention`][] takes.
    - `ref_counts`: int32 `num_pages`: how many entries of the table refer to each page.
        Those with 0 are free.
    - `key_scale`, `value_scale`: None, or for int8 pages, float32 `num_pages page_size
        kv_heads`, as in [`eqx_attention.KVCache`][].
    """

    key_pages: _KeyPages
    value_pages: _ValuePages
    page_table: Int32[Array, "batch max_pages"]
    lengths: Int[Array, " batch"]
    ref_counts: Int32[Array, " num_pages"]
    key_scale: _PageScales | None = None
    value_scale: _PageScales | None = None

    @staticmethod
    def init(
        num_pages: int,
        page_size: int,
        batch_size: int,
        max_pages: int,
        kv_heads: int,
        qk_dim: int,
        v_dim: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> "PagedKVCache":
        """A cache without tokens, whose pages are all free.

        **Arguments:**

        - `num_pages`, `page_size`: how many pages there are, and the tokens of each.
        - `batch_size`, `max_pages`: how many sequences, and the most pages of each.
        - `kv_heads`, `qk_dim`, `v_dim`, `dtype`: as in [`eqx_attention.KVCache`][].

        **Raises:** `ValueError` for a negative size, or no page or no slot in it;
        `TypeError` for what is no int or no such dtype.
        """
        v_dim = qk_dim if v_dim is None else v_dim
        check_sizes(
            num_pages=num_pages,
            page_size=page_size,
            batch_size=batch_size,
            max_pages=max_pages,
            kv_heads=kv_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
        )
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if size == 0:
                raise ValueError(f"{name} is 0, but must be at least 1")
        slots = num_pages, page_size, kv_heads
        key = Store.zeros((*slots, qk_dim), dtype)
        value = Store.zeros((*slots, v_dim), dtype)
        return PagedKVCache(
            key.data,
            value.data,
            jnp.full((batch_size, max_pages), _NO_PAGE, jnp.int32),
            jnp.zeros(batch_size, jnp.int32),
            jnp.zeros(num_pages, jnp.int32),
            key.scale,
            value.scale,
        )

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return self.key_pages.shape[1]

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence may have."""
        return self.page_table.shape[1] * self.page_size

    @property
    def num_free_pages(self) -> Int32[Array, ""]:
        """How many pages no sequence refers to."""
        return jnp.sum(self.ref_counts == 0, dtype=jnp.int32)

    @checked
    @override
    def append(
        self,
        key: Float[Array, "batch num_rows kv_heads qk_dim"],
        value: Float[Array, "batch num_rows kv_heads v_dim"],
        num_tokens: Integer[Array, " batch"] | None = None,
    ) -> "PagedKVCache":
        """The cache with rows written after the tokens of each sequence.

        Pages are taken as they are needed, in order, for one sequence after the other.

        **Arguments:** as for [`eqx_attention.KVCache`][].

        **Returns:** the new cache.

        **Raises:** `ValueError` for rows that do not fit the cache, for a sequence that
        outgrows `max_pages`, and if there are not enough free pages. Where the values
        are traced, that is an error at run time in the debugging mode; without it the
        tokens that have no place are lost, `lengths` don't count them, and nothing else
        is touched.
        """
        num_rows, capacity = key.shape[1], self.capacity
        for name, rows, cache in (
            ("key", key, self.key_pages),
            ("value", value, self.value_pages),
        ):
            check_rows(name, rows, cache, self.lengths.shape[0], capacity)
        num_tokens = token_counts(num_tokens, self.lengths, num_rows)
        wanted = check_values(
            self.lengths + num_tokens,
            self.lengths + num_tokens > capacity,
            f"a sequence of the cache outgrows its capacity of {capacity} tokens",
            lengths=self.lengths,
            num_tokens=num_tokens,
        )
        if 0 in key.shape[:2]:
            return self
        wanted = jnp.minimum(wanted, capacity)
        placing = _Placing(self, wanted, num_rows)
        lengths = check_values(
            placing.lengths,
            placing.lengths < wanted,
            "the cache has not enough free pages for all tokens",
            num_free_pages=self.num_free_pages,
            lengths=self.lengths,
            num_tokens=num_tokens,
        )
        table = placing.page_table

        # Rows that have no place are sent past the last page: there a write is dropped.
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        position = self.lengths[:, None] + row
        entry = jnp.minimum(position // self.page_size, table.shape[1] - 1)
        page = jnp.take_along_axis(table, entry, axis=1)
        page = jnp.where(position < lengths[:, None], page, self.key_pages.shape[0])
        index = page, position % self.page_size

        def write(pages: Store, rows: Array) -> Store:
            return pages.copy(placing.old_page, placing.new_page).write(index, rows)

        new_key = write(Store(self.key_pages, self.key_scale), key)
        new_value = write(Store(self.value_pages, self.value_scale), value)
        return PagedKVCache(
            new_key.data,
            new_value.data,
            table,
            lengths,
            placing.ref_counts,
            new_key.scale,
            new_value.scale,
        )

    @checked
    def free(self, sequence: int | Integer[Array, "..."]) -> "PagedKVCache":
        """The cache without the tokens of a sequence, or of several.

        Pages that no other sequence shares are free again. A sequence without tokens
        stays so.

        **Arguments:**

        - `sequence`: which, as integers of any shape.

        **Returns:** the new cache.

        **Raises:** `ValueError` for a sequence that is not there. A traced one is an
        error at run time in the debugging mode; without it, it is left out.
        """
        chosen = self._chosen("sequence", sequence)
        pages = jnp.where(chosen[:, None], self.page_table, _NO_PAGE)
        return dataclasses.replace(
            self,
            page_table=jnp.where(chosen[:, None], _NO_PAGE, self.page_table),
            lengths=jnp.where(chosen, 0, self.lengths),
            ref_counts=_count(self.ref_counts, pages, -1),
        )

    @checked
    def share(
        self,
        source: _Sequence,
        target: _Sequence,
        num_tokens: _Sequence | None = None,
    ) -> "PagedKVCache":
        """The cache with the first tokens of `source` in `target` too, without a copy.

        Both go on as they like: a page that both refer to is copied before one of them
        writes to it.

        **Arguments:**

        - `source`, `target`: two sequences, of which `target` has no tokens.
        - `num_tokens`: how many; by default all that `source` has.

        **Returns:** the new cache.

        **Raises:** `ValueError` for a sequence that is not there, a target that has
        tokens, and for more tokens than `source` has. Where values are traced, that is
        an error at run time in the debugging mode; without it, `target` gets no more
        than there is, and stays as it is if it has tokens.
        """
        batch = self.lengths.shape[0]
        from_ = self._chosen("source", source)
        into = self._chosen("target", target)
        length = jnp.sum(jnp.where(from_, self.lengths, 0), dtype=jnp.int32)
        count = length
        if num_tokens is not None:
            count = _as_int32("num_tokens", num_tokens)
            count = check_values(
                count,
                (count < 0) | (count > length),
                "num_tokens must not be negative nor more than the source has",
                num_tokens=count,
                source_length=length,
            )
            count = jnp.clip(count, 0, length)
        count = check_values(
            count,
            jnp.any(into & (self.lengths > 0)),
            "target must have no tokens: free it first",
            target=_as_int32("target", target),
            lengths=self.lengths,
        )
        into = into & (self.lengths == 0)
        entry = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)
        at = jnp.clip(_as_int32("source", source), 0, max(batch - 1, 0))
        shared = jnp.take(self.page_table, at, axis=0, mode="clip")
        shared = jnp.where(entry * self.page_size < count, shared, _NO_PAGE)[None]
        table = jnp.where(into[:, None], shared, self.page_table)
        return dataclasses.replace(
            self,
            page_table=table,
            lengths=jnp.where(into, count, self.lengths),
            ref_counts=_count(
                self.ref_counts, jnp.where(into[:, None], shared, _NO_PAGE), 1
            ),
        )

    def _chosen(
        self, name: str, sequence: int | Integer[Array, "..."]
    ) -> Bool[Array, " batch"]:
        """True for the sequences that are named."""
        batch = self.lengths.shape[0]
        ids = _as_int32(name, sequence)
        ids = check_values(
            ids,
            (ids < 0) | (ids >= batch),
            f"{name} must lie between 0 and {batch - 1}",
            **{name: ids},
        )
        return jnp.any(
            ids.reshape(-1, 1) == jnp.arange(batch, dtype=jnp.int32)[None], axis=0
        )

    @override
    def _decode_inputs(
        self,
        query: Array,
        num_tokens: Array | None,
        block_size: int,
        options: ScoreOptions,
    ) -> DecodeInputs:
        pages = PagedCache.of(
            Store(self.key_pages, self.key_scale),
            Store(self.value_pages, self.value_scale),
            self.page_table,
            block_size,
        )
        start = jnp.zeros_like(self.lengths)
        return DecodeInputs(query, pages, start, self.lengths, num_tokens, **options)


class _Placing(eqx.Module):
    """The pages that the tokens of an `append` go to.

    A sequence needs a new page where it has none, and in place of one that others refer
    to as well, unless all of them leave it: then the last keeps it.

    **Fields:**

    - `page_table`, `ref_counts`, `lengths`: those of the new cache.
    - `old_page`, `new_page`: the page that each sequence copies, and where to; the
        number of pages if it copies none.
    """

    page_table: Int32[Array, "batch max_pages"]
    ref_counts: Int32[Array, " num_pages"]
    lengths: Int32[Array, " batch"]
    old_page: Int32[Array, " batch"]
    new_page: Int32[Array, " batch"]

    def __init__(
        self, cache: PagedKVCache, lengths: Int32[Array, " batch"], num_rows: int
    ) -> None:
        table, ref_counts = cache.page_table, cache.ref_counts
        (num_pages, page_size), max_pages = cache.key_pages.shape[:2], table.shape[1]
        # The entries that rows can reach, from the one of the next token on.
        reach = min(max_pages, -(-(num_rows + page_size - 1) // page_size))
        entry = (cache.lengths // page_size)[:, None]
        entry = entry + jnp.arange(reach, dtype=jnp.int32)[None]
        begin = entry * page_size
        written = (begin < lengths[:, None]) & (lengths > cache.lengths)[:, None]
        page = jnp.take_along_axis(table, jnp.minimum(entry, max_pages - 1), axis=1)

        # Only the first entry can have a page already: one that is full in part.
        fills_up = written & (begin < cache.lengths[:, None])
        old = jnp.where(fills_up, page, num_pages)[:, :1]
        left_before = jnp.sum(
            jnp.tril(old == old.T, -1), axis=1, keepdims=True, dtype=jnp.int32
        )
        copies = fills_up & (_at(ref_counts, page) - left_before > 1)

        # Free pages go to who comes first.
        needs = written & (copies | ~fills_up)
        rank = jnp.cumsum(needs.ravel(), dtype=jnp.int32).reshape(needs.shape) - 1
        gets = needs & (rank < cache.num_free_pages)
        free = jnp.nonzero(ref_counts == 0, size=num_pages, fill_value=num_pages)[0]
        new = _at(free.astype(jnp.int32), rank)

        ref_counts = _count(ref_counts, jnp.where(gets & copies, page, _NO_PAGE), -1)
        # If another found no page to leave for, the last may not write here either.
        keeps = fills_up & ~copies & (_at(ref_counts, page) == 1)
        stuck = written & ~(gets | keeps)
        end = jnp.where(
            stuck, jnp.maximum(begin, cache.lengths[:, None]), lengths[:, None]
        )
        sequence = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
        entry = jnp.where(gets, entry, max_pages)
        self.page_table = table.at[sequence, entry].set(new, mode="drop")
        self.ref_counts = _count(ref_counts, jnp.where(gets, new, _NO_PAGE), 1)
        self.lengths = jnp.min(end, axis=1)
        self.old_page = jnp.where(gets & copies, page, num_pages)[:, 0]
        self.new_page = jnp.where(gets & copies, new, num_pages)[:, 0]


def _at(x: Array, index: Array) -> Array:
    return jnp.take(x, index, mode="clip")


def _count(
    counts: Int32[Array, " num_pages"], pages: Int32[Array, "batch count"], by: int
) -> Int32[Array, " num_pages"]:
    """`counts`, changed by `by` for each time that a page is named."""
    pages = jnp.where(pages >= 0, pages, counts.shape[0])
    return counts.at[pages].add(by, mode="drop")


def _as_int32(name: str, x: int | Integer[Array, "..."]) -> Int32[Array, "..."]:
    if isinstance(x, int):
        check_int(name, x)
        return jnp.asarray(x, jnp.int32)
    return int32(name, x)
