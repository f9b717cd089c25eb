"""The backends, and what AUTO resolves to, and why."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Literal, Unpack

import jax

from ._config import ChunkSizes, Differentiation, default_chunk_sizes
from ._request import Request
from ._tuning_cache import Entry, tables
from ._typing import HasShape, checked
from .functional._options import CommonOptions
from .kernels._cudnn import CUDNN
from .kernels._fa4 import FA4
from .kernels._kernel import Kernel
from .kernels._splash import SPLASH
from .kernels._tokamax import TOKAMAX

_STANDARD_LENGTH = 384
"""Measured on a CPU of two cores: at 512, flash takes 0.7 times as long, and 0.4 to 0.7
times for the gradient; at 256 and 384 the one or the other is faster."""
STANDARD_LOGITS = 2**26
"""As many are made at once at most, unless STANDARD is asked for."""


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
    CUDNN = "cudnn"
    """cuDNN's kernel for NVIDIA GPUs, through `jax.nn.dot_product_attention`."""
    SPLASH = "splash"
    """JAX's Pallas kernel for TPUs."""
    TOKAMAX = "tokamax"
    """A kernel of the package tokamax, for NVIDIA GPUs."""
    FA4 = "fa4"
    """FlashAttention-4 of the package fa4-jax, for NVIDIA GPUs."""


KERNELS: Mapping[Backend, Kernel] = {
    Backend.CUDNN: CUDNN,
    Backend.SPLASH: SPLASH,
    Backend.TOKAMAX: TOKAMAX,
    Backend.FA4: FA4,
}
"""The kernels of other libraries. Those that AUTO may take it tries in this order."""

Origin = Literal["explicit", "cached", "rule"]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The backend that a call uses, and the reason.

    **Fields:**

    - `backend`, `reason`.
    - `chunk_sizes`: what it goes by; None if it has none, or decodes by its own rule.
    - `origin`: where they are from. "explicit": the call gives them. "cached": they
        were found by [`eqx_attention.tuning.tune`][]. "rule": of the backend's default.
    """

    backend: Backend
    reason: str
    chunk_sizes: ChunkSizes | None = None
    origin: Origin | None = None


@checked
def resolve(
    query: HasShape,
    key: HasShape,
    value: HasShape | None = None,
    *,
    backend: Backend = Backend.AUTO,
    sequence_end: HasShape | None = None,
    chunk_sizes: ChunkSizes | None = None,
    differentiation: Differentiation = Differentiation.REVERSE,
    return_lse: bool = False,
    **options: Unpack[CommonOptions],
) -> Resolution:
    """The backend that [`eqx_attention.attention`][] takes for these arguments.

    **Arguments:** as there; of query, key and value only shapes and dtypes are looked
    at, so `jax.ShapeDtypeStruct` will do. `value` is by default as `key`.

    **Returns:** a `Resolution`.

    **Raises:** `ValueError` if the backend asked for can't do what is asked.
    """
    if backend is Backend.RAGGED_DECODE and sequence_end is None:
        raise ValueError(
            "backend is RAGGED_DECODE, but sequence_end is None: decoding needs the "
            "end of each sequence in the cache"
        )
    decodes = backend in (Backend.AUTO, Backend.RAGGED_DECODE)
    if sequence_end is not None and not decodes:
        raise ValueError(
            f"sequence_end is given, but backend is {backend.name}: only RAGGED_DECODE "
            "takes it (or AUTO, which then chooses that)"
        )
    if backend is Backend.STANDARD and chunk_sizes is not None:
        raise ValueError(
            "chunk_sizes are given, but backend is STANDARD, which has no chunks"
        )
    if sequence_end is not None:
        reason = "sequence_end is given, so this decodes from a cache"
        if backend is not Backend.AUTO:
            reason = "it was asked for"
        origin = None if chunk_sizes is None else "explicit"
        return Resolution(Backend.RAGGED_DECODE, reason, chunk_sizes, origin)
    if len(query.shape) < 3:
        raise ValueError(
            f"query has shape {query.shape}, but needs (*batch, q_len, q_heads, "
            "qk_dim): only decoding, with sequence_end, takes a single token without "
            "q_len"
        )
    request = Request.of(
        query,
        key,
        value,
        chunk_sizes=chunk_sizes,
        differentiation=differentiation,
        return_lse=return_lse,
        **options,
    )
    if backend is not Backend.AUTO:
        refusal = why_not(backend, request)
        if refusal is not None:
            raise ValueError(f"backend is {backend.name}, but {refusal}")
        return _with_sizes(backend, "it was asked for", request)
    if chunk_sizes is not None:
        return _with_sizes(Backend.FLASH, "chunk_sizes are given", request)
    return _tuned(request) or by_rule(request)


def why_not(backend: Backend, request: Request) -> str | None:
    """Why a backend can't do here what is asked; None if it can."""
    kernel = KERNELS.get(backend)
    return None if kernel is None else kernel.absence() or kernel.refusal(request)


def rule_chunk_sizes(backend: Backend, request: Request) -> ChunkSizes | None:
    """The chunk sizes of a backend if none are given or tuned; None if it has none."""
    if backend is Backend.FLASH:
        group = request.q_heads // max(request.kv_heads, 1)
        return default_chunk_sizes(
            request.q_len, request.kv_len, group, local=request.local
        )
    kernel = KERNELS.get(backend)
    if kernel is None or kernel.chunk_rule is None:
        return None
    return kernel.chunk_rule(request)


def _tuned(request: Request) -> Resolution | None:
    """What was found by tuning AUTO, if it can do this request too."""
    entry = _lookup(Backend.AUTO, request)
    if entry is None or entry.backend not in {b.value for b in Backend}:
        return None
    backend = Backend(entry.backend)
    if backend in (Backend.AUTO, Backend.RAGGED_DECODE):
        return None
    if backend is Backend.STANDARD and request.num_logits > STANDARD_LOGITS:
        return None
    if why_not(backend, request) is not None:
        return None
    return _with_sizes(backend, "it was the fastest when this was tuned", request)


def by_rule(request: Request) -> Resolution:
    """By size; where chunks are needed, a kernel of the device if it can do it."""
    q_len, kv_len = request.q_len, request.kv_len
    if q_len * kv_len > _STANDARD_LENGTH**2:
        reason = (
            f"{q_len} x {kv_len} is more than {_STANDARD_LENGTH} x {_STANDARD_LENGTH} "
            "pairs of tokens"
        )
    elif request.num_logits > STANDARD_LOGITS:
        reason = f"{request.num_logits} logits are more than {STANDARD_LOGITS}"
    else:
        return Resolution(
            Backend.STANDARD, f"{q_len} x {kv_len} pairs of tokens fit into one block"
        )
    for backend, kernel in KERNELS.items():
        if not kernel.automatic or kernel.absence() is not None:
            continue
        refusal = kernel.refusal(request)
        if refusal is None and (request.divided or jax.device_count() > 1):
            # Nothing here tells how arrays will be divided, and it can't divide itself.
            refusal = "there are several devices, or it is within shard_map"
        if refusal is None:
            return _with_sizes(backend, reason, request)
        reason += f"; not {backend.name}: {refusal}"
    return _with_sizes(Backend.FLASH, reason, request)


def _with_sizes(backend: Backend, reason: str, request: Request) -> Resolution:
    """Explicit sizes, else cached ones, else those of the rule."""
    if request.chunk_sizes is not None:
        return Resolution(backend, reason, request.chunk_sizes, "explicit")
    rule = rule_chunk_sizes(backend, request)
    if rule is None:
        return Resolution(backend, reason)
    entry = _lookup(backend, request)
    if entry is not None and entry.query_chunk and entry.key_chunk:
        sizes = ChunkSizes(entry.query_chunk, entry.key_chunk)
        if why_not(backend, request.with_sizes(sizes)) is None:
            return Resolution(backend, reason, sizes, "cached")
    return Resolution(backend, reason, rule, "rule")


def _lookup(backend: Backend, request: Request) -> Entry | None:
    """What tuning found; what it found with the gradient comes first.

    A call can't see whether it will be differentiated. Several processes have to
    compile the same, so there only a table that the program itself brings counts.
    """
    found = tables(with_file=jax.process_count() == 1)
    if not found:
        return None
    keys = [request.tuning_key(backend.value, t) for t in ("gradient", "forward")]
    for table in found:
        for key in keys:
            if key in table:
                return table[key]
    return None
