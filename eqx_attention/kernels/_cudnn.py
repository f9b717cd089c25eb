"""cuDNN's attention, by way of `jax.nn.dot_product_attention`.

Its causality begins at the top left, as ours does by default. Its masks and biases are
added as large numbers, so that a row masked everywhere is a mean there and 0 here: they
are refused. Its lse has no gradient. Accumulates in float32.
"""

from jax.nn import dot_product_attention
from jaxtyping import Array

from .._request import Request
from ._kernel import Kernel, Operands, Support


def limits(request: Request) -> str | None:
    """Why cuDNN can't do what is asked, beyond what `SUPPORT` says."""
    if request.qk_dim != request.v_dim:
        return f"value has heads of {request.v_dim} and query of {request.qk_dim}"
    if request.qk_dim % 8 or request.qk_dim > 128:
        return f"query has heads of {request.qk_dim}: it needs a multiple of 8 to 128"
    if (request.left, request.right) == (None, None):
        return None
    if request.right != 0 or request.offset != 0:
        return "it masks only what is after a query, counted from the top left"
    if request.q_len > request.kv_len:
        return f"{request.q_len} queries are causal to {request.kv_len} keys only"
    return None


def attend(request: Request, operands: Operands) -> Array:
    """The output of cuDNN."""
    window = None if request.left is None else (request.left, 0)
    return dot_product_attention(
        operands.query,
        operands.key,
        operands.value,
        scale=request.softmax_scale,
        is_causal=request.right == 0,
        local_window_size=window,
        implementation="cudnn",
    )


CUDNN = Kernel(
    module="jax",
    package="jax[cuda]",
    platform="gpu",
    device="NVIDIA",
    automatic=True,
    support=Support(
        options={
            "causal": "yes",
            "sliding_window": "(left, 0) or causal",
            "alignment": "no window, not causal",
            "query_offset": "no window, not causal",
        },
        dtypes=("bfloat16", "float16"),
        head_dims="one width, a multiple of 8 to 128",
        derivatives="first, reverse mode",
        seen_on="no device; it lowers for CUDA",
    ),
    limits=limits,
    attend=attend,
)
