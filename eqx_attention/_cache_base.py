"""What the caches of past tokens have in common."""

import abc
from typing import Literal, TypeAlias, Unpack, overload

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int8, Integer

from ._config import check_int
from ._typing import checked
from .functional._decode_inputs import (
    DecodeInputs,
    check_block_size,
    check_num_tokens,
    decode,
)
from .functional._options import ScoreOptions

KeyRows: TypeAlias = (
    Float[Array, "batch capacity kv_heads qk_dim"]
    | Int8[Array, "batch capacity kv_heads qk_dim"]
)
ValueRows: TypeAlias = (
    Float[Array, "batch capacity kv_heads v_dim"]
    | Int8[Array, "batch capacity kv_heads v_dim"]
)
RowScales: TypeAlias = Float32[Array, "batch capacity kv_heads"]


class AbstractKVCache(eqx.Module):
    """The keys and values of a batch of sequences, each with a length of its own.

    Frozen: `append` returns a new cache. Under jit with the old one donated, rows are
    written in place. `append` and then `attend` is causal attention of the new tokens,
    so a prompt in chunks of any size comes to the same as a prompt at once.

    **Fields:**

    - `lengths`: int32 `batch`: how many tokens each sequence has.
    """

    lengths: eqx.AbstractVar[Int[Array, " batch"]]

    @abc.abstractmethod
    def append(
        self,
        key: Float[Array, "batch num_rows kv_heads qk_dim"],
        value: Float[Array, "batch num_rows kv_heads v_dim"],
        num_tokens: Integer[Array, " batch"] | None = None,
    ) -> "AbstractKVCache":
        """The cache with rows written after the tokens of each sequence.

        **Arguments:**

        - `key`, `value`: `batch num_rows kv_heads qk_dim` and `batch num_rows kv_heads
            v_dim`. They are stored in the cache's dtype.
        - `num_tokens`: integers, `batch`: how many of the rows, from the first on, are
            tokens of each sequence; the rest is padding. By default all are.

        **Returns:** the new cache.

        **Raises:** `ValueError` for rows that do not fit the cache, and for values that
        do not, where they are known. Traced values are an error at run time in the
        debugging mode.
        """

    @abc.abstractmethod
    def _decode_inputs(
        self,
        query: Array,
        num_tokens: Array | None,
        block_size: int,
        options: ScoreOptions,
    ) -> DecodeInputs:
        """What `attend` computes."""

    @overload
    def attend(
        self,
        query: Float[Array, "batch ... q_heads qk_dim"],
        *,
        num_tokens: Integer[Array, " batch"] | None = None,
        block_size: int | None = None,
        return_lse: Literal[False] = False,
        **options: Unpack[ScoreOptions],
    ) -> Float[Array, "batch ... q_heads v_dim"]: ...
    @overload
    def attend(
        self,
        query: Float[Array, "batch ... q_heads qk_dim"],
        *,
        num_tokens: Integer[Array, " batch"] | None = None,
        block_size: int | None = None,
        return_lse: Literal[True],
        **options: Unpack[ScoreOptions],
    ) -> tuple[
        Float[Array, "batch ... q_heads v_dim"], Float[Array, "batch q_heads ..."]
    ]: ...
    @checked
    def attend(
        self,
        query: Float[Array, "batch ... q_heads qk_dim"],
        *,
        num_tokens: Integer[Array, " batch"] | None = None,
        block_size: int | None = None,
        return_lse: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> (
        Float[Array, "batch ... q_heads v_dim"]
        | tuple[
            Float[Array, "batch ... q_heads v_dim"], Float[Array, "batch q_heads ..."]
        ]
    ):
        """Attention of the last tokens of each sequence to all of it.

        **Arguments:**

        - `query`: `batch q_heads qk_dim` (one token) or `batch q_len q_heads qk_dim`:
            the last tokens of each sequence, whose keys are in the cache already.
        - `num_tokens`: as in `append`: how many of the queries, from the first on, are
            tokens of each sequence. The rest has output 0 and lse -inf.
        - `block_size`, `return_lse` and the rest are as in
            [`eqx_attention.ragged_decode_attention`][].

        **Returns and raises:** as [`eqx_attention.ragged_decode_attention`][].
        """
        size = check_block_size(block_size)
        inputs = self._decode_inputs(query, num_tokens, size, options)
        out, lse = decode(inputs)
        return (out, lse) if return_lse else out


def check_sizes(**sizes: int) -> None:
    """Refuses sizes that are no int, or negative."""
    for name, size in sizes.items():
        check_int(name, size)
        if size < 0:
            raise ValueError(f"{name} is {size}, but must not be negative")


def check_rows(name: str, rows: Array, cache: Array, batch: int, most: int) -> None:
    """Rows to append have the batch, the heads and the width of the cache."""
    heads, dim = cache.shape[-2:]
    if (rows.shape[0], *rows.shape[2:]) != (batch, heads, dim) or rows.shape[1] > most:
        raise ValueError(
            f"{name} has shape {rows.shape}, but this cache takes ({batch}, num_rows, "
            f"{heads}, {dim}) with num_rows at most {most}"
        )


def token_counts(
    num_tokens: Integer[Array, " batch"] | None,
    lengths: Int[Array, " batch"],
    num_rows: int,
) -> Int[Array, " batch"]:
    """How many of the rows each sequence takes: by default all."""
    counts = check_num_tokens(num_tokens, num_rows)
    return jnp.full_like(lengths, num_rows) if counts is None else counts
