"""Keys and values of past tokens, kept for decoding in a row for each sequence."""

from typing import final

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer
from typing_extensions import override

from ._cache_base import (
    AbstractKVCache,
    KeyRows,
    RowScales,
    ValueRows,
    check_rows,
    check_sizes,
    token_counts,
)
from ._typing import check_values, checked
from .functional._caches import ContiguousCache
from .functional._decode_inputs import DecodeInputs
from .functional._options import ScoreOptions
from .functional._store import Store


@final
class KVCache(AbstractKVCache):
    r"""The keys and values of a batch of sequences, each with a length of its own.

    Frozen: `append` returns a new cache. Under jit with the old one donated, rows are
    written in place. `append` and then `attend` is causal attention of the new tokens,
    so a prompt in chunks of any size comes to the same as a prompt at once.

    **Fields:**

    - `key`, `value`: `batch capacity kv_heads qk_dim` and `batch capacity kv_heads
        v_dim`.
    - `lengths`: int32 `batch`: how many tokens each sequence has. It is the
        `sequence_end` of [`eqx_attention.ragged_decode_attention`][].
    - `key_scale`, `value_scale`: None, or if `key` and `value` are int8, float32 `batch
        capacity kv_heads`. Then what each token and head holds is the integers times
        the scale.

    In int8 a number is off by at most $\max |x| / 254$, with the largest of its token
    and head, and rounding in float32. A token and head that holds NaN or infinity reads
    as NaN throughout, and only those who see the token see that.
    """

    key: KeyRows
    value: ValueRows
    lengths: Int[Array, " batch"]
    key_scale: RowScales | None = None
    value_scale: RowScales | None = None

    @staticmethod
    def init(
        batch_size: int,
        capacity: int,
        kv_heads: int,
        qk_dim: int,
        v_dim: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> "KVCache":
        """A cache without tokens.

        **Arguments:**

        - `batch_size`, `capacity`: how many sequences, and the most tokens of each.
        - `kv_heads`, `qk_dim`, `v_dim`: of keys and values; `v_dim` is `qk_dim` by
            default.
        - `dtype`: a floating dtype, or int8; float32 by default.

        **Raises:** `ValueError` for a negative size, `TypeError` for what is no int or
        no such dtype.
        """
        v_dim = qk_dim if v_dim is None else v_dim
        check_sizes(
            batch_size=batch_size,
            capacity=capacity,
            kv_heads=kv_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
        )
        rows = batch_size, capacity, kv_heads
        return _cache_of(
            Store.zeros((*rows, qk_dim), dtype),
            Store.zeros((*rows, v_dim), dtype),
            jnp.zeros(batch_size, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence may have."""
        return self.key.shape[1]

    @checked
    @override
    def append(
        self,
        key: Float[Array, "batch num_rows kv_heads qk_dim"],
        value: Float[Array, "batch num_rows kv_heads v_dim"],
        num_tokens: Integer[Array, " batch"] | None = None,
    ) -> "KVCache":
        """The cache with rows written after the tokens of each sequence.

        **Arguments:**

        - `key`, `value`: `batch num_rows kv_heads qk_dim` and `batch num_rows kv_heads
            v_dim`. They are stored in the cache's dtype.
        - `num_tokens`: integers, `batch`: how many of the rows, from the first on, are
            tokens of each sequence; the rest is padding. By default all are.

        **Returns:** the new cache.

        **Raises:** `ValueError` for rows that do not fit the cache, and for a sequence
        that outgrows the capacity. Where lengths are traced, that is an error at run
        time in the debugging mode; without it the tokens past the capacity are lost,
        and nothing else is touched.
        """
        (batch, num_rows), capacity = key.shape[:2], self.capacity
        for name, rows, cache in (("key", key, self.key), ("value", value, self.value)):
            check_rows(name, rows, cache, self.lengths.shape[0], capacity)
        num_tokens = token_counts(num_tokens, self.lengths, num_rows)
        lengths = check_values(
            self.lengths + num_tokens,
            self.lengths + num_tokens > capacity,
            f"a sequence of the cache outgrows its capacity of {capacity} tokens",
            lengths=self.lengths,
            num_tokens=num_tokens,
        )
        # Rows that are padding are sent past the end, where a write is dropped.
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        slots = self.lengths[:, None] + row
        slots = jnp.where(row < num_tokens[:, None], slots, capacity)
        index = jnp.arange(batch, dtype=jnp.int32)[:, None], slots
        return _cache_of(
            Store(self.key, self.key_scale).write(index, key),
            Store(self.value, self.value_scale).write(index, value),
            jnp.minimum(lengths, capacity),
        )

    @override
    def _decode_inputs(
        self,
        query: Array,
        num_tokens: Array | None,
        block_size: int,
        options: ScoreOptions,
    ) -> DecodeInputs:
        rows = ContiguousCache(
            Store(self.key, self.key_scale),
            Store(self.value, self.value_scale),
            max(1, min(block_size, self.capacity)),
        )
        start = jnp.zeros_like(self.lengths)
        return DecodeInputs(query, rows, start, self.lengths, num_tokens, **options)


def _cache_of(key: Store, value: Store, lengths: Int[Array, " batch"]) -> KVCache:
    return KVCache(key.data, value.data, lengths, key.scale, value.scale)
