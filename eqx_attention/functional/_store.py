"""How the numbers of a cache are kept: as they are, or in eight bits with a scale."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int8

from .._jax import read_bits

_Index = TypeVar("_Index")
_LARGEST = 127


class Store(eqx.Module):
    r"""Rows of numbers; the leading axes say which row.

    With a scale, a row x is kept as the integers $\mathrm{round}(x / s)$ and the scale
    $s = \max |x| / 127$, so each number is off by at most $s / 2$, and what rounding in
    float32 adds. A row of zeros has the scale 0. A row that is not finite has the scale
    NaN, and reads as NaN throughout.
    """

    data: Float[Array, "*rows dim"] | Int8[Array, "*rows dim"]
    scale: Float32[Array, "*rows"] | None

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> "Store":
        """Rows of zeros; int8 ones have scales."""
        dtype = jnp.dtype(dtype)
        if dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype is {dtype}, but must be floating or int8")
        scale = jnp.zeros(shape[:-1], jnp.float32) if dtype == jnp.int8 else None
        return Store(jnp.zeros(shape, dtype), scale)

    def read(
        self, get: Callable[[Array, _Index], Array], index: _Index
    ) -> Float[Array, "..."]:
        """The rows that `get` takes from an array that has the leading axes."""
        return self._numbers(read_bits(get, self.data, index), get, index)

    def read_all(
        self, get: Callable[[Array, _Index], Array], index: _Index
    ) -> Float[Array, "..."]:
        """As `read`, with derivatives, for many rows outside a loop."""
        return self._numbers(get(self.data, index), get, index)

    def write(
        self, index: tuple[Int[Array, "..."], ...], rows: Float[Array, "..."]
    ) -> "Store":
        """With `rows` put at `index`; what lies outside is dropped."""
        if self.scale is None:
            return Store(_put(self.data, index, rows.astype(self.data.dtype)), None)
        rows = rows.astype(jnp.float32)
        scale = jnp.max(jnp.abs(rows), axis=-1, initial=0.0) / _LARGEST
        scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
        divisor = jnp.where(scale > 0, scale, 1.0)[..., None]
        integers = jnp.clip(jnp.round(rows / divisor), -_LARGEST, _LARGEST)
        integers = jnp.where(jnp.isnan(integers), 0.0, integers).astype(jnp.int8)
        return Store(_put(self.data, index, integers), _put(self.scale, index, scale))

    def copy(self, old: Int[Array, " count"], new: Int[Array, " count"]) -> "Store":
        """With all rows of `old[i]`, along the first axis, also at `new[i]`."""

        def copy(x: Array) -> Array:
            return _put(x, (new,), jnp.take(x, old, axis=0, mode="clip"))

        scale = None if self.scale is None else copy(self.scale)
        return Store(copy(self.data), scale)

    def _numbers(
        self, rows: Array, get: Callable[[Array, _Index], Array], index: _Index
    ) -> Array:
        if self.scale is None:
            return rows
        scale = get(self.scale, index)
        return rows.astype(scale.dtype) * scale[..., None]


def _put(x: Array, index: tuple[Array, ...], rows: Array) -> Array:
    return x.at[index].set(rows, mode="drop")
