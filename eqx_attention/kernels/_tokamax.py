"""Tokamax's attention kernels for NVIDIA GPUs: `pip install tokamax`.

Its band begins at the top left. Its XLA implementations, to which it would fall back,
are not asked for: they are no kernels. Accumulates in float32.
"""

import importlib
from typing import Any

from jaxtyping import Array

from .._jax import promotion_is_strict
from .._request import Request
from ._kernel import Kernel, Operands, Support


def limits(request: Request) -> str | None:
    """Why tokamax can't do what is asked, beyond what `SUPPORT` says."""
    if promotion_is_strict():
        return "jax_numpy_dtype_promotion is strict, under which it does not trace"
    banded = (request.left, request.right) != (None, None)
    if banded and request.offset != 0:
        return "its mask begins at the top left"
    return None


def attend(
    request: Request,
    operands: Operands,
    *,
    implementation: tuple[str, ...] = ("mosaic", "triton"),
) -> Array:
    """The output of the first of its implementations that takes the shapes."""
    library: Any = importlib.import_module("tokamax")
    left, right = request.left, request.right
    furthest = request.q_len + request.kv_len
    window = None
    if left is not None or right not in (None, 0):
        window = (
            furthest if left is None else left,
            furthest if right is None else right,
        )
    return library.dot_product_attention(
        operands.query,
        operands.key,
        operands.value,
        scale=request.softmax_scale,
        is_causal=left is None and right == 0,
        local_window_size=window,
        logits_soft_cap=request.logits_soft_cap,
        implementation=implementation,
    )


TOKAMAX = Kernel(
    module="tokamax",
    package="tokamax",
    platform="gpu",
    device="NVIDIA",
    automatic=False,
    support=Support(
        options={
            "causal": "yes",
            "sliding_window": "yes",
            "alignment": "no window, not causal",
            "query_offset": "no window, not causal",
            "logits_soft_cap": "yes",
        },
        dtypes=("bfloat16", "float16"),
        head_dims="any that it takes itself",
        derivatives="first, reverse mode",
        seen_on="no device; its XLA implementation on a CPU",
    ),
    limits=limits,
    attend=attend,
)
