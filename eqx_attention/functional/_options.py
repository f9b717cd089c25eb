"""The keyword arguments that standard and flash attention share, for overloads.

The functions spell them out; an overload, which only says what comes back, does not.
"""

from typing import TypedDict

from jaxtyping import DTypeLike

from .._config import Alignment, Precision
from .._normalizer import Normalizer
from .._typing import (
    Bias,
    CumSeqlens,
    DropoutKey,
    KeySegments,
    Mask,
    Number,
    QueryOffset,
    QuerySegments,
    Scale,
    SinkBias,
    SinkLogits,
    Window,
)


class ScoreOptions(TypedDict, total=False):
    """What every backend takes."""

    mask: Mask | None
    bias: Bias | None
    softmax_aux: SinkLogits | None
    num_sink_tokens: int
    sink_bias: SinkBias | None
    sliding_window: Window | None
    softmax_scale: Scale | None
    logits_soft_cap: Number | None
    logits_dtype: DTypeLike
    precision: Precision


class InputOptions(ScoreOptions, total=False):
    """What standard and flash attention make logits and weights of."""

    causal: bool
    alignment: Alignment
    query_offset: QueryOffset | None
    q_segment_ids: QuerySegments | None
    kv_segment_ids: KeySegments | None
    cum_seqlens_q: CumSeqlens | None
    cum_seqlens_k: CumSeqlens | None
    dropout_prob: Number
    dropout_key: DropoutKey | None


class CommonOptions(InputOptions, total=False):
    """What standard and flash attention take."""

    normalizer: Normalizer
