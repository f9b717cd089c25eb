"""FlashAttention-4 for NVIDIA GPUs, from fa4-jax: `pip install "fa4-jax[cu13]"`.

Its band begins at the bottom right. It needs Python 3.12 or newer.
Accumulates in float32.
"""

import importlib
from typing import Any

from jaxtyping import Array

from .._request import Request
from ._kernel import Kernel, Operands, Support


def limits(request: Request) -> str | None:
    """Why FlashAttention-4 can't do what is asked, beyond what `SUPPORT` says."""
    for size in (request.qk_dim, request.v_dim):
        if size % 8 or size > 256:
            return f"a head is {size} wide: it needs a multiple of 8 to 256"
    banded = (request.left, request.right) != (None, None)
    if banded and request.offset != request.kv_len - request.q_len:
        return "its mask begins at the bottom right"
    return None


def attend(request: Request, operands: Operands, *, backend: str = "cute") -> Array:
    """The output of FlashAttention-4; its backend "reference" runs anywhere."""
    library: Any = importlib.import_module("fa4_jax")
    return library.flash_attn(
        operands.query,
        operands.key,
        operands.value,
        window_size=(request.left, request.right),
        scale=request.softmax_scale,
        backend=backend,
    )


FA4 = Kernel(
    module="fa4_jax",
    package="fa4-jax",
    platform="gpu",
    device="NVIDIA",
    automatic=False,
    support=Support(
        options={
            "causal": "with equal lengths, or BOTTOM_RIGHT",
            "sliding_window": "with equal lengths, or BOTTOM_RIGHT",
            "alignment": "yes",
            "query_offset": "kv_len - q_len",
        },
        dtypes=("bfloat16", "float16"),
        head_dims="multiples of 8 to 256 (128 on data-centre Blackwell)",
        derivatives="first, reverse mode",
        seen_on="no device; its reference on a CPU",
    ),
    limits=limits,
    attend=attend,
)
