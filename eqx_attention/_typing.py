"""Shapes of the public arguments, and the switches of the run-time checks."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jaxtyping import Array, Bool, Float, Int32, Integer, PRNGKeyArray, jaxtyped

from ._debug import DEBUG
from ._jax import error_if, is_traced
from .functional._mask import AbstractMask
from .functional._score import AbstractScore

Query: TypeAlias = Float[Array, "*batch q_len q_heads qk_dim"]
Key: TypeAlias = Float[Array, "*batch kv_len kv_heads qk_dim"]
Value: TypeAlias = Float[Array, "*batch kv_len kv_heads v_dim"]
Out: TypeAlias = Float[Array, "*batch q_len q_heads v_dim"]
Lse: TypeAlias = Float[Array, "*batch q_heads q_len"]
Weights: TypeAlias = Float[Array, "*batch q_heads q_len kv_len"]

# These two broadcast to `*batch q_heads q_len kv_len`; their head axis may also be
# kv_heads, which no shape string can say: `functional/_inputs.py` checks them.
Mask: TypeAlias = AbstractMask | Bool[Array, "..."] | Integer[Array, "..."]
Bias: TypeAlias = AbstractScore | Float[Array, "..."]

SinkLogits: TypeAlias = Float[Array, "q_heads num_sinks"] | Float[Array, " num_sinks"]
SinkBias: TypeAlias = (
    Float[Array, "q_heads num_sink_tokens"] | Float[Array, " num_sink_tokens"]
)
# An int is a float to a static type checker, but not to one at run time.
Number: TypeAlias = float | int
Scale: TypeAlias = Number | Float[Array, ""]
Window: TypeAlias = int | tuple[int | None, int | None]
QuerySegments: TypeAlias = Integer[Array, "*#batch q_len"]
KeySegments: TypeAlias = Integer[Array, "*#batch kv_len"]
CumSeqlens: TypeAlias = Integer[Array, " num_sequences_plus_one"]
QueryOffset: TypeAlias = int | Integer[Array, "*#batch"]
KeyPages: TypeAlias = Float[Array, "num_pages page_size kv_heads qk_dim"]
ValuePages: TypeAlias = Float[Array, "num_pages page_size kv_heads v_dim"]
PageTable: TypeAlias = Integer[Array, "*batch max_pages"]
DropoutKey: TypeAlias = PRNGKeyArray


@runtime_checkable
class HasShape(Protocol):
    """An array, or what stands for one, such as `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers."""
        ...


_Function = TypeVar("_Function", bound=Callable[..., object])


def checked(function: _Function) -> _Function:
    """Checks types, dtypes and shapes of arguments and results at every call.

    The cost is paid while tracing, about 0.1 ms; compiled code holds no trace of it.
    `JAXTYPING_DISABLE=1` turns it off.
    """
    return jaxtyped(typechecker=beartype)(function)


def debug_error_if(x: Array, wrong: Bool[Array, "..."], message: str) -> Array:
    """`x`, which raises `message` at run time where `wrong`, in the debugging mode."""
    return error_if(x, wrong, message) if DEBUG else x


def check_values(
    x: Array, wrong: Bool[Array, "..."], message: str, **got: Array
) -> Array:
    """`x`, whose values are right.

    Where they are known, ones that are `wrong` are a `ValueError` with `message` and
    what was got. Those of traced arrays are an error in the debugging mode.
    """
    if is_traced(wrong):
        return debug_error_if(x, wrong, message)
    if jnp.any(wrong):
        values = ", ".join(f"{name} = {np.asarray(y)}" for name, y in got.items())
        raise ValueError(f"{message}: {values}")
    return x


def int32(name: str, x: Integer[Array, "..."]) -> Int32[Array, "..."]:
    """`x` as int32; numbers that do not fit are an error, as in `check_values`."""
    widest = jnp.iinfo(jnp.int32)
    given = jnp.iinfo(x.dtype)
    if given.min >= widest.min and given.max <= widest.max:
        return x.astype(jnp.int32)
    wrong = x > jnp.asarray(widest.max, x.dtype)
    if given.min < widest.min:
        wrong = wrong | (x < jnp.asarray(widest.min, x.dtype))
    return check_values(
        x.astype(jnp.int32),
        wrong,
        f"{name} has numbers that do not fit into int32",
        **{name: x},
    )
