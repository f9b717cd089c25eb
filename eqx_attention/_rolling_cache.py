"""A cache of constant size: a window of past tokens, and the first ones."""

import dataclasses
from typing import final

import equinox as eqx
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
from ._config import check_num_sink_tokens, window_bounds
from ._typing import Window, checked
from .functional._caches import ContiguousCache
from .functional._decode_inputs import NOWHERE, DecodeInputs
from .functional._options import ScoreOptions
from .functional._store import Store


@final
class RollingKVCache(AbstractKVCache):
    r"""The last tokens of each sequence, and its first ones: as many as a window needs.

    Its memory is constant, however long a sequence grows. `attend` gives what a cache
    of all tokens gives with this `sliding_window` and these `num_sink_tokens` (Xiao et
    al. 2023, arXiv 2309.17453). A sequence may have up to 2^30 tokens.

    With $n$ sink tokens, a window that reaches `left` tokens back and $R =$ `left +
    max_rows`, token $p$ is kept in slot $p$ if $p < n$, and else in slot $n + (p - n)
    \bmod R$, until another takes its place.

    **Fields:**

    - `key`, `value`, `key_scale`, `value_scale`: as in [`eqx_attention.KVCache`][],
        with a capacity of $n + R$.
    - `lengths`: int32 `batch`: how many tokens each sequence has had.
    - `left`, `num_sink_tokens`, `max_rows`: what it was made for.
    """

    key: KeyRows
    value: ValueRows
    lengths: Int[Array, " batch"]
    key_scale: RowScales | None
    value_scale: RowScales | None
    left: int = eqx.field(static=True)
    num_sink_tokens: int = eqx.field(static=True)
    max_rows: int = eqx.field(static=True)

    @staticmethod
    def init(
        batch_size: int,
        window: Window,
        kv_heads: int,
        qk_dim: int,
        v_dim: int | None = None,
        *,
        num_sink_tokens: int = 0,
        max_rows: int = 1,
        dtype: DTypeLike = jnp.float32,
    ) -> "RollingKVCache":
        """A cache without tokens.

        **Arguments:**

        - `batch_size`, `kv_heads`, `qk_dim`, `v_dim`, `dtype`: as in
            [`eqx_attention.KVCache`][].
        - `window`: as `sliding_window` of [`eqx_attention.ragged_decode_attention`][];
            it must be bounded on the left.
        - `num_sink_tokens`: how many of the first tokens are always seen.
        - `max_rows`: the most rows of one `append`, and queries of one `attend`.

        **Raises:** `ValueError` for a negative size or a window without a bound,
        `TypeError` for what is no int or no such dtype.
        """
        v_dim = qk_dim if v_dim is None else v_dim
        check_sizes(
            batch_size=batch_size, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim
        )
        left = window_bounds(window)[0]
        if left is None:
            raise ValueError(f"window is {window}, but must be bounded on the left")
        check_num_sink_tokens(num_sink_tokens)
        check_sizes(max_rows=max_rows)
        if max_rows == 0:
            raise ValueError("max_rows is 0, but must be at least 1")
        rows = batch_size, num_sink_tokens + left + max_rows, kv_heads
        key = Store.zeros((*rows, qk_dim), dtype)
        value = Store.zeros((*rows, v_dim), dtype)
        return RollingKVCache(
            key=key.data,
            value=value.data,
            lengths=jnp.zeros(batch_size, jnp.int32),
            key_scale=key.scale,
            value_scale=value.scale,
            left=left,
            num_sink_tokens=num_sink_tokens,
            max_rows=max_rows,
        )

    @property
    def capacity(self) -> int:
        """The most tokens that are kept of a sequence."""
        return self.num_sink_tokens + self._ring

    @property
    def _ring(self) -> int:
        return self.left + self.max_rows

    @property
    def positions(self) -> Int[Array, "batch capacity"]:
        """Where the token in each slot stands; far after all if there is none yet."""
        slot = jnp.arange(self.capacity, dtype=jnp.int32)[None]
        # The newest token of the ring, and how many steps before it a slot was written.
        newest = self.lengths[:, None] - 1
        age = (newest - slot) % self._ring
        position = jnp.where(slot < self.num_sink_tokens, slot, newest - age)
        written = (position >= jnp.minimum(slot, self.num_sink_tokens)) & (
            position <= newest
        )
        return jnp.where(written, position, NOWHERE)

    @checked
    @override
    def append(
        self,
        key: Float[Array, "batch num_rows kv_heads qk_dim"],
        value: Float[Array, "batch num_rows kv_heads v_dim"],
        num_tokens: Integer[Array, " batch"] | None = None,
    ) -> "RollingKVCache":
        """The cache with rows in place of the oldest outside the window.

        **Arguments:** as for [`eqx_attention.KVCache`][], with at most `max_rows` rows.

        **Returns:** the new cache.

        **Raises:** `ValueError` for rows that do not fit the cache, and for values of
        `num_tokens` that are more than the rows or negative. Where they are traced,
        that is an error at run time in the debugging mode; without it they count as the
        nearest that fits.
        """
        batch, num_rows = key.shape[:2]
        for name, rows, cache in (("key", key, self.key), ("value", value, self.value)):
            check_rows(name, rows, cache, self.lengths.shape[0], self.max_rows)
        num_tokens = token_counts(num_tokens, self.lengths, num_rows)
        row = jnp.arange(num_rows, dtype=jnp.int32)[None]
        position = self.lengths[:, None] + row
        sinks = self.num_sink_tokens
        slots = jnp.where(
            position < sinks, position, sinks + (position - sinks) % self._ring
        )
        # Rows that are padding are sent past the end, where a write is dropped.
        slots = jnp.where(row < num_tokens[:, None], slots, self.capacity)
        index = jnp.arange(batch, dtype=jnp.int32)[:, None], slots
        new_key = Store(self.key, self.key_scale).write(index, key)
        new_value = Store(self.value, self.value_scale).write(index, value)
        return dataclasses.replace(
            self,
            key=new_key.data,
            value=new_value.data,
            lengths=self.lengths + num_tokens,
            key_scale=new_key.scale,
            value_scale=new_value.scale,
        )

    @override
    def _decode_inputs(
        self,
        query: Array,
        num_tokens: Array | None,
        block_size: int,
        options: ScoreOptions,
    ) -> DecodeInputs:
        mask = options.get("mask")
        is_tree = isinstance(mask, Array) and mask.shape[-1:] == query.shape[1:-2]
        for name in ("bias",) if is_tree else ("mask", "bias"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name} is given, but in a rolling cache tokens have no fixed "
                    "place that it could speak of"
                )
        for name in ("sliding_window", "num_sink_tokens"):
            if name in options:
                raise ValueError(
                    f"{name} is given, but a rolling cache has its own, from `init`"
                )
        if query.ndim == 4 and query.shape[1] > self.max_rows:
            raise ValueError(
                f"query has {query.shape[1]} tokens, but this cache takes at most "
                f"max_rows = {self.max_rows} at once"
            )
        options = options | ScoreOptions(
            sliding_window=(self.left, 0), num_sink_tokens=self.num_sink_tokens
        )
        slots = ContiguousCache(
            Store(self.key, self.key_scale),
            Store(self.value, self.value_scale),
            min(block_size, self.capacity),
        )
        return DecodeInputs(
            query,
            slots,
            jnp.zeros_like(self.lengths),
            self.lengths,
            num_tokens,
            self.positions,
            **options,
        )
