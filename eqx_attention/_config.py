"""What a person chooses once: plain, frozen, hashable values."""

import dataclasses
import enum
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from ._jax import on_cpu, positive_range
from ._normalizer import SOFTMAX, Entmax, Normalizer, Softmax
from ._typing import Number, Window

Precision: TypeAlias = jax.lax.PrecisionLike

FURTHEST = 2**30
"""No two tokens are further apart, and twice that still fits into int32."""


class Alignment(enum.Enum):
    """Where the queries stand when there are fewer (or more) of them than keys."""

    TOP_LEFT = "top_left"
    """Query i stands at position i: both begin together."""
    BOTTOM_RIGHT = "bottom_right"
    """Query i stands at i + kv_len - q_len: both end together."""


class Differentiation(enum.Enum):
    """Which modes of differentiation flash attention is open to."""

    REVERSE = "reverse"
    """Reverse mode first; its gradient may be differentiated again in either mode."""
    BOTH = "both"
    """Forward and reverse mode, in any order."""


@dataclasses.dataclass(frozen=True)
class ChunkSizes:
    """How many queries and how many keys flash attention takes at a time.

    **Arguments:**

    - `query`, `key`: positive integers. Any size is right for any length; the sizes
        change the speed and the memory of a call, and its result by rounding alone.

    **Raises:** `TypeError` for what is no integer, `ValueError` for one below 1.
    """

    query: int
    key: int

    def __post_init__(self) -> None:
        for name, size in (("query", self.query), ("key", self.key)):
            check_int(f"ChunkSizes.{name}", size)
            if size < 1:
                raise ValueError(f"ChunkSizes.{name} is {size}, but must be at least 1")


_PRODUCTS_SPREAD_BY_HEAD = jax.__version_info__ >= (0, 11)
"""Whether XLA gives the products of a tile's heads to several cores of a CPU.

Before, each product has to be large enough for several cores by itself.
"""


def default_chunk_sizes(
    q_len: int, kv_len: int, group: int = 1, *, local: bool = False
) -> ChunkSizes:
    """The chunk sizes that flash attention takes if it is given none.

    On a CPU 256 x 256; but with JAX 0.10, and if each query head has a key head of its
    own (`group`, how many share one, is 1), 512 x 512, or 512 x 256 if attention is
    `local`: a window, segments or cumulative lengths are given. On other devices 512 x
    1024. No more than the lengths.

    Measured on a CPU of two cores, float32, 8 heads of 64, causal. With JAX 0.12, at
    2048, 512 x 512 takes 1.12 times as long forward, and 1.15 times for the gradient.
    With JAX 0.10, where 256 x 256 uses one core, that takes 1.5 and 1.3 times as long
    as 512 x 512, but 0.82 and 0.95 times with 4 query heads to a key head; and a window
    of 256 at 8192 takes 0.8 times as long with 512 x 256.

    **On other devices nothing was measured.** Compiled for a TPU v5e (bfloat16, 4 x 16
    heads of 128, causal, at 8192), tiles of 512 x 1024 move 0.7 times the bytes of 256
    x 256 forward and 0.34 times with the gradient; 1024 x 1024 moves about as many, and
    needs a third more memory. On a GPU fewer and larger tiles are fewer kernels to
    launch. Tokamax takes the same chunks in its loop for XLA. Measure yours with
    [`eqx_attention.tuning.tune`][].
    """
    if not on_cpu():
        return ChunkSizes(min(512, max(q_len, 1)), min(1024, max(kv_len, 1)))
    query = key = 256
    if group == 1 and not _PRODUCTS_SPREAD_BY_HEAD:
        query, key = 512, 256 if local else 512
    return ChunkSizes(min(query, max(q_len, 1)), min(key, max(kv_len, 1)))


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The options of an attention that do not change from call to call.

    **Arguments:** as in [`eqx_attention.standard_attention`][], but that
    `softmax_scale` and the alpha of an `Entmax` are plain floats here; and
    `differentiation` as in [`eqx_attention.flash_attention`][]. Lists are not taken: a
    config is hashable.

    **Raises:** `TypeError` or `ValueError` for what no attention can do.
    """

    causal: bool = False
    alignment: Alignment = Alignment.TOP_LEFT
    sliding_window: Window | None = None
    softmax_scale: Number | None = None
    logits_soft_cap: Number | None = None
    dropout_prob: Number = 0.0
    num_sink_tokens: int = 0
    logits_dtype: DTypeLike = jnp.float32
    precision: Precision = None
    differentiation: Differentiation = Differentiation.REVERSE
    normalizer: Normalizer = SOFTMAX

    def __post_init__(self) -> None:
        check_is_a("causal", self.causal, bool)
        check_is_a("alignment", self.alignment, Alignment)
        window_bounds(self.sliding_window)
        if self.softmax_scale is not None:
            check_scale(self.softmax_scale)
        check_logits_dtype(self.logits_dtype)
        check_soft_cap(self.logits_soft_cap, self.logits_dtype)
        check_dropout_prob(self.dropout_prob)
        check_num_sink_tokens(self.num_sink_tokens)
        check_is_a("differentiation", self.differentiation, Differentiation)
        check_normalizer(self.normalizer)


def window_bounds(window: Window | None) -> tuple[int | None, int | None]:
    """`(left, right)` of a sliding window; None stands for unbounded."""
    if window is None:
        return None, None
    bounds = window if isinstance(window, tuple) else (window, window)
    if len(bounds) != 2:
        raise ValueError(
            f"sliding_window is {window}, but must be an int or a pair (left, right)"
        )
    for bound in bounds:
        if bound is not None:
            check_int("sliding_window", bound)
            if bound < 0:
                raise ValueError(
                    f"sliding_window is {window}, but its bounds count keys and "
                    "must not be negative (None means unbounded)"
                )
    left, right = (None if b is None or b > FURTHEST else b for b in bounds)
    return left, right


def check_is_a(name: str, value: object, kind: type) -> None:
    """Refuses what is not of a class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, but must be a {kind.__name__}")


def check_int(name: str, value: object) -> None:
    """Refuses what is not an int; a bool is not one here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, but must be an int")


def check_number(name: str, value: object) -> None:
    """Refuses what is neither a float nor an int."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise TypeError(f"{name} is {value!r}, but must be a float")


def check_normalizer(normalizer: object) -> None:
    """A normalizer of a config is hashable, and so without arrays."""
    if not isinstance(normalizer, Softmax | Entmax):
        raise TypeError(
            f"normalizer is {normalizer!r}, but must be Softmax() or Entmax(alpha)"
        )
    if isinstance(normalizer, Entmax) and not isinstance(normalizer.alpha, float | int):
        raise TypeError(
            "normalizer has an array as its alpha, but in a config it must be a float: "
            "give an alpha that is to be trained to the call"
        )


def check_scale(softmax_scale: Number) -> None:
    """A scale is a finite number, of any sign."""
    check_number("softmax_scale", softmax_scale)
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale}, but must be finite")


def check_soft_cap(logits_soft_cap: Number | None, logits_dtype: DTypeLike) -> None:
    """A soft cap is a positive number that logits can reach."""
    if logits_soft_cap is not None:
        check_number("logits_soft_cap", logits_soft_cap)
        lowest, highest = positive_range(logits_dtype)
        if not lowest <= logits_soft_cap <= highest:
            raise ValueError(
                f"logits_soft_cap is {logits_soft_cap}, but must be positive and "
                f"within the range of {jnp.dtype(logits_dtype)} (None means no cap)"
            )


def check_dropout_prob(dropout_prob: Number) -> None:
    """A probability lies between 0 and 1."""
    check_number("dropout_prob", dropout_prob)
    if not 0 <= dropout_prob <= 1:
        raise ValueError(
            f"dropout_prob is {dropout_prob}, but must lie between 0 and 1"
        )


def check_num_sink_tokens(num_sink_tokens: int) -> None:
    """A number of tokens is an int that is not negative."""
    check_int("num_sink_tokens", num_sink_tokens)
    if not 0 <= num_sink_tokens <= FURTHEST:
        raise ValueError(
            f"num_sink_tokens is {num_sink_tokens}, but must not be negative nor more "
            f"than {FURTHEST}"
        )


def check_logits_dtype(logits_dtype: DTypeLike | None) -> None:
    """A softmax needs floating point numbers, and among them minus infinity."""
    dtype = None if logits_dtype is None else jnp.dtype(logits_dtype)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"logits_dtype is {dtype}, but must be a floating dtype of 16 bits or more"
        )
