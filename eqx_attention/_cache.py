"""Keys and values of past tokens, kept for decoding."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer

from ._config import check_int
from ._typing import checked, debug_error_if, int32


class KVCache(eqx.Module):
    """The keys and values of a batch of sequences, each with a length of its own.

    Frozen: `append` returns a new cache. Under jit with the old one donated, rows are
    written in place.

    **Fields:**

    - `key`, `value`: `batch capacity kv_heads qk_dim` and `batch capacity kv_heads
        v_dim`.
    - `lengths`: int32 `batch`: how many tokens each sequence has. It is the
        `sequence_end` of [`eqx_attention.ragged_decode_attention`][].
    """

    key: Float[Array, "batch capacity kv_heads qk_dim"]
    value: Float[Array, "batch capacity kv_heads v_dim"]
    lengths: Int[Array, " batch"]

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
        - `dtype`: a floating dtype; float32 by default.

        **Raises:** `ValueError` for a negative size, `TypeError` for what is no int or
        no floating dtype.
        """
        v_dim = qk_dim if v_dim is None else v_dim
        sizes = {
            "batch_size": batch_size,
            "capacity": capacity,
            "kv_heads": kv_heads,
            "qk_dim": qk_dim,
            "v_dim": v_dim,
        }
        for name, size in sizes.items():
            check_int(name, size)
            if size < 0:
                raise ValueError(f"{name} is {size}, but must not be negative")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype is {jnp.dtype(dtype)}, but must be floating")
        shape = batch_size, capacity, kv_heads
        return KVCache(
            jnp.zeros((*shape, qk_dim), dtype),
            jnp.zeros((*shape, v_dim), dtype),
            jnp.zeros(batch_size, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence may have."""
        return self.key.shape[1]

    @checked
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

        **Raises:** `ValueError` for rows that do not fit the cache. A sequence that
        outgrows the capacity is an error at run time in the debugging mode; without it
        the tokens past the capacity are lost, and nothing else is touched.
        """
        num_rows, capacity = key.shape[1], self.capacity
        _check_rows("key", key, self.key)
        _check_rows("value", value, self.value)
        rows = jnp.arange(num_rows, dtype=jnp.int32)[None]
        if num_tokens is None:
            num_tokens = jnp.full_like(self.lengths, num_rows)
        num_tokens = int32("num_tokens", num_tokens)
        num_tokens = debug_error_if(
            num_tokens,
            (num_tokens < 0) | (num_tokens > num_rows),
            f"num_tokens must lie between 0 and {num_rows}, the number of rows",
        )
        num_tokens = jnp.clip(num_tokens, 0, num_rows)
        lengths = self.lengths + num_tokens
        lengths = debug_error_if(
            lengths,
            lengths > capacity,
            f"a sequence of the cache outgrows its capacity of {capacity} tokens",
        )
        # Rows that are padding are sent past the end, where a write is dropped.
        slots = jnp.where(
            rows < num_tokens[:, None], self.lengths[:, None] + rows, capacity
        )
        sequences = jnp.arange(key.shape[0], dtype=jnp.int32)[:, None]

        def write(cache: Array, new: Array) -> Array:
            return cache.at[sequences, slots].set(new.astype(cache.dtype), mode="drop")

        return KVCache(
            write(self.key, key),
            write(self.value, value),
            jnp.minimum(lengths, capacity),
        )


def _check_rows(name: str, rows: Array, cache: Array) -> None:
    needed = (cache.shape[0], *cache.shape[2:])
    if (rows.shape[0], *rows.shape[2:]) != needed or rows.shape[1] > cache.shape[1]:
        raise ValueError(
            f"{name} has shape {rows.shape}, but this cache takes ({cache.shape[0]}, "
            f"num_rows, {cache.shape[2]}, {cache.shape[3]}) with num_rows at most its "
            f"capacity of {cache.shape[1]}"
        )
