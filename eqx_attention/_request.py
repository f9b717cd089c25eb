"""What one call asks for, as far as shapes and static options say it."""

import dataclasses
import functools
import math
import os
import platform
from importlib import metadata
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._config import Alignment, ChunkSizes, Differentiation, window_bounds
from ._jax import varying_axes
from ._normalizer import Entmax
from ._typing import HasShape
from ._version import VERSION
from .functional._mask import AbstractMask
from .functional._options import CommonOptions

Timed: TypeAlias = Literal["gradient", "forward"]

_PRESENT = (
    "mask",
    "bias",
    "softmax_aux",
    "sink_bias",
    "q_segment_ids",
    "kv_segment_ids",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "query_offset",
    "logits_soft_cap",
    "precision",
    "chunk_sizes",
)
_OPTIONS = {
    *CommonOptions.__optional_keys__,
    *("chunk_sizes", "differentiation", "return_lse"),
}
_LOCAL = {"q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k"}
_NOT_IN_KIND = {
    *("causal", "sliding_window"),
    *("chunk_sizes", "differentiation", "return_lse"),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What one call asks for: all that the choice of a backend depends on.

    **Fields:** sizes; dtypes of query, key and value; the band `-left <= kv position -
    query position - offset <= right` (None is unbounded; an `offset` of None is known
    at run time only); whether queries and keys have the same ids, and whether the mask
    leaves each query few keys; whether it is a part within `jax.shard_map`; and
    `asked`, the names of the options that do something.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtypes: tuple[str, str, str]
    left: int | None
    right: int | None
    offset: int | None
    softmax_scale: float
    logits_soft_cap: float | None
    chunk_sizes: ChunkSizes | None
    one_set_of_ids: bool
    local_mask: bool
    divided: bool
    asked: frozenset[str]

    @classmethod
    def of(
        cls,
        query: HasShape,
        key: HasShape,
        value: HasShape | None = None,
        **options: Any,
    ) -> "Request":
        """The request of a call of [`eqx_attention.attention`][]; value is as key."""
        for name in options.keys() - _OPTIONS:
            raise TypeError(f"{name} is no option of attention")
        value = key if value is None else value
        q_len, q_heads, qk_dim = query.shape[-3:]
        kv_len, kv_heads = key.shape[-3:-1]
        left, right = window_bounds(options.get("sliding_window"))
        if options.get("causal"):
            right = 0 if right is None else min(right, 0)
        offset = options.get("query_offset")
        if offset is None:
            aligned = options.get("alignment") is Alignment.BOTTOM_RIGHT
            offset = kv_len - q_len if aligned else 0
        scale = options.get("softmax_scale")
        known = scale is None or isinstance(scale, int | float)
        mask = options.get("mask")
        q_ids, kv_ids = options.get("q_segment_ids"), options.get("kv_segment_ids")
        return cls(
            math.prod(key.shape[:-3]),
            q_len,
            kv_len,
            q_heads,
            kv_heads,
            qk_dim,
            value.shape[-1],
            (str(query.dtype), str(key.dtype), str(value.dtype)),
            left,
            right,
            offset if isinstance(offset, int) else None,
            1 / math.sqrt(max(qk_dim, 1)) if scale is None or not known else scale,
            options.get("logits_soft_cap"),
            options.get("chunk_sizes"),
            q_ids is kv_ids or kv_ids is None or q_ids is None,
            isinstance(mask, AbstractMask) and mask.is_local,
            isinstance(query, Array) and bool(varying_axes(query)),
            _asked(options, aligned_apart=q_len != kv_len, known_scale=known),
        )

    @property
    def local(self) -> bool:
        """Whether a window, segments, cumulative lengths or such a mask are given."""
        given = self.left is not None or bool(self.asked & _LOCAL)
        return given or self.local_mask

    @property
    def num_logits(self) -> int:
        """One for each batch element, head and pair."""
        return self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def has_empty_rows(self) -> bool:
        """Whether the band leaves a query without a key, or may."""
        if self.offset is None or 0 in (self.q_len, self.kv_len):
            return True
        nothing_before = self.right is not None and self.offset + self.right < 0
        last = self.q_len - 1 + self.offset
        nothing_after = self.left is not None and last - self.left >= self.kv_len
        return nothing_before or nothing_after

    @property
    def seen_keys(self) -> tuple[int, int]:
        """The first key that the band lets a query see, and the one after the last."""
        assert self.offset is not None
        start, end = 0, self.kv_len
        if self.left is not None:
            start = max(0, self.offset - self.left)
        if self.right is not None:
            end = min(end, self.q_len + self.offset + self.right)
        return start, end

    def with_sizes(self, sizes: ChunkSizes) -> "Request":
        """The same with these chunk sizes."""
        asked = self.asked | {"chunk_sizes"}
        return dataclasses.replace(self, chunk_sizes=sizes, asked=asked)

    def tuning_key(self, backend: str, timed: Timed) -> str:
        """What a result of tuning holds for: where it was found, and for which calls.

        Lengths and windows count up to the next power of two. The batch does not count:
        under `jax.vmap`, as Equinox has it, it can't be seen.
        """
        kind = ["full"]
        if (self.left, self.right) != (None, None):
            kind = [f"band {_bucket(self.left)}/{_bucket(self.right)}"]
        dtypes = self.dtypes[:1] if len(set(self.dtypes)) == 1 else self.dtypes
        return "; ".join(
            (
                device_kind(),
                *versions(),
                backend,
                "/".join(dtypes),
                f"heads {self.q_heads}/{self.kv_heads}",
                f"dims {self.qk_dim}/{self.v_dim}",
                f"lengths {_bucket(self.q_len)}/{_bucket(self.kv_len)}",
                *kind,
                *sorted(self.asked - _NOT_IN_KIND),
                timed,
            )
        )


@functools.cache
def versions() -> tuple[str, ...]:
    """Those of jax, jaxlib and this package, by name."""
    others = (f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib"))
    return (*others, f"eqx_attention {VERSION}")


def device_kind() -> str:
    """The kind of the first device; of a CPU, the number of its cores too."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu {platform.machine()}, {os.cpu_count()} cores"
    return device.device_kind


def _bucket(size: int | None) -> str:
    """The next power of two."""
    return "all" if size is None else str(1 << max(size - 1, 0).bit_length())


def _asked(
    options: dict[str, Any], *, aligned_apart: bool, known_scale: bool
) -> frozenset[str]:
    """The options that do something: a dropout of 0, say, does not."""
    asked = {name for name in _PRESENT if options.get(name) is not None}
    does = {
        "causal": options.get("causal", False),
        "sliding_window": window_bounds(options.get("sliding_window")) != (None, None),
        "alignment": aligned_apart
        and options.get("alignment") is Alignment.BOTTOM_RIGHT,
        "num_sink_tokens": options.get("num_sink_tokens", 0) > 0,
        "dropout_prob": options.get("dropout_prob", 0) > 0,
        "logits_dtype": jnp.dtype(options.get("logits_dtype", jnp.float32))
        != jnp.float32,
        "softmax_scale as an array": not known_scale,
        "normalizer": isinstance(options.get("normalizer"), Entmax),
        "differentiation": options.get("differentiation") is Differentiation.BOTH,
        "return_lse": options.get("return_lse", False),
    }
    return frozenset(asked | {name for name, it_does in does.items() if it_does})
