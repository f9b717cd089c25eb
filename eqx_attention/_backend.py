"""The backends, and what AUTO resolves to, and why."""

import dataclasses
import enum
import math

from ._typing import HasShape, checked

_STANDARD_LENGTH = 384
"""Measured on a CPU of two cores: at 512, flash takes 0.7 times as long, and 0.4 to 0.7
times for the gradient; at 256 and 384 the one or the other is faster."""
_STANDARD_LOGITS = 2**26


class Backend(enum.Enum):
    """How the matrix of weights is walked. All give the same result."""

    AUTO = "auto"
    """The one that suits the arguments, their size and the device."""
    STANDARD = "standard"
    """The whole matrix at once: [`eqx_attention.standard_attention`][]."""
    FLASH = "flash"
    """Chunk by chunk: [`eqx_attention.flash_attention`][]."""
    RAGGED_DECODE = "ragged_decode"
    """A part of a cache: [`eqx_attention.ragged_decode_attention`][]."""


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The backend that a call uses, and the reason."""

    backend: Backend
    reason: str


@checked
def resolve(
    query: HasShape,
    key: HasShape,
    value: HasShape | None = None,
    *,
    backend: Backend = Backend.AUTO,
    sequence_end: HasShape | None = None,
    chunk_sizes: object = None,
) -> Resolution:
    """The backend that [`eqx_attention.attention`][] takes for these arguments.

    **Arguments:** as there; only shapes are looked at, so `jax.ShapeDtypeStruct` will
    do.

    **Returns:** a `Resolution` with the fields `backend` and `reason`.

    **Raises:** `ValueError` if the backend asked for can't do what is asked.
    """
    del value
    if backend is Backend.RAGGED_DECODE and sequence_end is None:
        raise ValueError(
            "backend is RAGGED_DECODE, but sequence_end is None: decoding needs the "
            "end of each sequence in the cache"
        )
    if backend in (Backend.STANDARD, Backend.FLASH) and sequence_end is not None:
        raise ValueError(
            f"sequence_end is given, but backend is {backend.name}: only RAGGED_DECODE "
            "takes it (or AUTO, which then chooses that)"
        )
    if backend is Backend.STANDARD and chunk_sizes is not None:
        raise ValueError(
            "chunk_sizes are given, but backend is STANDARD, which has no chunks"
        )
    if sequence_end is None and len(query.shape) < 3:
        raise ValueError(
            f"query has shape {query.shape}, but needs (*batch, q_len, q_heads, "
            "qk_dim): only decoding, with sequence_end, takes a single token without "
            "q_len"
        )
    if backend is not Backend.AUTO:
        return Resolution(backend, "it was asked for")
    if sequence_end is not None:
        return Resolution(
            Backend.RAGGED_DECODE, "sequence_end is given, so this decodes from a cache"
        )
    if chunk_sizes is not None:
        return Resolution(Backend.FLASH, "chunk_sizes are given")
    q_len, q_heads = query.shape[-3:-1]
    kv_len = key.shape[-3]
    logits = math.prod(key.shape[:-3]) * q_heads * q_len * kv_len
    if q_len * kv_len > _STANDARD_LENGTH**2:
        return Resolution(
            Backend.FLASH,
            f"{q_len} x {kv_len} is more than {_STANDARD_LENGTH} x {_STANDARD_LENGTH} "
            "pairs of tokens",
        )
    if logits > _STANDARD_LOGITS:
        return Resolution(
            Backend.FLASH, f"{logits} logits are more than {_STANDARD_LOGITS}"
        )
    return Resolution(
        Backend.STANDARD,
        f"{q_len} x {kv_len} pairs of tokens fit into one block",
    )
