"""Scores that compose: what becomes of logits before the softmax.

    bias = SoftCap(30.0) >> ALiBi.of(num_heads)
    out = attention(query, key, value, bias=bias)

A score takes the scaled dot product of a query and a key, and where both stand, to a
new logit. All of its arrays have gradients, in memory that does not grow with the
square of the length. Positions are those of [`eqx_attention.masks`][].
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from ._config import check_int, check_soft_cap
from ._typing import Number
from .functional._checks import check_broadcasts
from .functional._function import Bound, own_function, probe
from .functional._layout import matrix
from .functional._mask import LogitsShape
from .functional._positions import Pairs
from .functional._score import AbstractScore as AbstractScore, Chain as Chain
from .functional._tiles import Matrix, Tile


class SoftCap(AbstractScore):
    """Logits x become `cap * tanh(x / cap)` (Gemma Team 2024, arXiv 2408.00118).

    **Arguments:**

    - `cap`: a positive float, or a 0-d array, which may be traced and has a gradient.
    """

    cap: Number | Float[Array, "..."]

    def __check_init__(self) -> None:
        if not isinstance(self.cap, Array):
            check_soft_cap(self.cap, jnp.float32)

    @override
    def bind(self, shape: LogitsShape) -> "SoftCap":
        """With an axis in front."""
        del shape
        return SoftCap(_whole("SoftCap.cap", self.cap))

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """By a hyperbolic tangent."""
        cap = jnp.asarray(self.cap)[0].astype(logits.dtype)
        return cap * jnp.tanh(logits / cap)


class ALiBi(AbstractScore):
    """`-slope * distance` is added (Press et al. 2021, arXiv 2108.12409).

    **Arguments:**

    - `slopes`: `q_heads`, or one for all. [`eqx_attention.scores.ALiBi.of`][] has the
        paper's.
    """

    slopes: Float[Array, "..."]

    @staticmethod
    def of(num_heads: int) -> "ALiBi":
        """The paper's slopes: for 8 heads, 1/2, 1/4 and so on to 1/256."""
        check_int("num_heads", num_heads)
        if num_heads < 1:
            raise ValueError(f"num_heads is {num_heads}, but must be at least 1")
        power = 2 ** math.floor(math.log2(num_heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
        return ALiBi(jnp.asarray(slopes + between[: num_heads - power], jnp.float32))

    @override
    def bind(self, shape: LogitsShape) -> "ALiBi":
        """With all axes in place."""
        return ALiBi(_heads_first("ALiBi.slopes", self.slopes, shape))

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """By the distance."""
        distance = jnp.abs(pairs.distance).astype(logits.dtype)
        return (
            logits - pairs.tile.over_heads(self.slopes).astype(logits.dtype) * distance
        )


class RelativeBias(AbstractScore):
    """A learned bias for each bucket of distances, as in T5.

    (Raffel et al. 2019, arXiv 1910.10683.) Near distances have a bucket each; beyond,
    buckets grow with the logarithm.

    **Arguments:**

    - `table`: `num_buckets q_heads`, as in T5.
    - `bidirectional`: if True, the default, keys before and after the query have half
        of the buckets each; if False, all keys after it share bucket 0.
    - `max_distance`: beyond it, all share the last bucket; 128 by default.
    """

    table: Float[Array, "..."]
    bidirectional: bool = eqx.field(static=True, default=True)
    max_distance: int = eqx.field(static=True, default=128)

    def __check_init__(self) -> None:
        check_int("RelativeBias.max_distance", self.max_distance)
        if self.table.ndim != 2:
            raise ValueError(
                f"RelativeBias.table has shape {self.table.shape}, but needs "
                "(num_buckets, q_heads)"
            )
        exact = self._num_exact(self.table.shape[0])
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"RelativeBias.table has {self.table.shape[0]} buckets and "
                f"max_distance is {self.max_distance}, but there must be at least "
                f"{4 if self.bidirectional else 2} buckets, and more positions than "
                "those with a bucket of their own"
            )

    def _num_exact(self, num_buckets: int) -> int:
        return (num_buckets // 2 if self.bidirectional else num_buckets) // 2

    @override
    def bind(self, shape: LogitsShape) -> "AbstractScore":
        """With all axes in place."""
        num_buckets = self.table.shape[0]
        table = _heads_first("RelativeBias.table", self.table.T, shape, 1)
        return _BoundRelativeBias(
            table, num_buckets, self.bidirectional, self.max_distance
        )

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """Bound, it is another score."""
        raise NotImplementedError


class _BoundRelativeBias(AbstractScore):
    table: Float[Array, "1 kv_heads group num_buckets"]
    num_buckets: int = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        tile = pairs.tile
        bucket = self._bucket(pairs.distance)
        table = self.table.astype(logits.dtype)
        # One bucket after the other: XLA's gather, and its scatter in the gradient,
        # take one number at a time.
        for i in range(self.num_buckets):
            own = tile.over_heads(table[..., i])
            logits = logits + jnp.where(bucket == i, own, jnp.zeros_like(own))
        return logits

    def _bucket(self, distance: Int[Array, "..."]) -> Int[Array, "..."]:
        """T5's bucket of each distance, the key's position minus the query's."""
        num_buckets, first = self.num_buckets, jnp.zeros_like(distance)
        if self.bidirectional:
            num_buckets //= 2
            first = jnp.where(distance > 0, jnp.full_like(distance, num_buckets), first)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        exact = num_buckets // 2
        share = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact)
        share = share / math.log(self.max_distance / exact)
        far = exact + (share * (num_buckets - exact)).astype(jnp.int32)
        far = jnp.minimum(far, num_buckets - 1)
        return first + jnp.where(distance < exact, distance, far)


class Bias(AbstractScore):
    """An array that is added, as given to `bias` itself.

    **Arguments:**

    - `array`: floating, broadcastable to `*batch q_heads q_len kv_len`, its head axis
        1, kv_heads or q_heads. Minus infinity forbids a pair, wherever it stands in a
        chain of scores.
    """

    array: Float[Array, "..."]

    @override
    def bind(self, shape: LogitsShape) -> "AbstractScore":
        """With all axes in place."""
        logits = (*shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
        check_broadcasts("bias", self.array, logits, shape.kv_heads)
        return _BoundBias(
            Matrix(matrix(self.array, shape.batch, shape.q_heads, shape.kv_heads))
        )

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """Bound, it is another score."""
        raise NotImplementedError


class _BoundBias(AbstractScore):
    matrix: Matrix

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        assert self.matrix.array is not None
        return logits + pairs.tile.arrange(self.matrix.array).astype(logits.dtype)

    @override
    def allowed(self, tile: Tile) -> Bool[Array, "..."] | None:
        assert self.matrix.array is not None
        return tile.arrange(self.matrix.array) != -jnp.inf


class Distance(AbstractScore):
    """A function of the distance is added.

    **Arguments:**

    - `fn`: called as `fn(distance)` with an int32 array, the keys' positions minus the
        queries'; returns floats of that shape, one for each number. What may be said of
        it is said in [`eqx_attention.scores.Score`][].
    """

    fn: Callable[[Array], Array]

    def __init__(self, fn: Callable[[Array], Array]) -> None:
        self.fn = own_function("Distance.fn", fn)

    @override
    def __repr__(self) -> str:
        return f"Distance({self.fn!r})"

    @override
    def bind(self, shape: LogitsShape) -> "AbstractScore":
        """With what is known of its results."""
        del shape
        function = Bound.of(self.fn)
        spec = jax.ShapeDtypeStruct((2, 3, 5, 7, 11), jnp.int32)
        _check_result("Distance.fn", probe("Distance.fn", function, spec), spec.shape)
        return _BoundDistance(function)

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """Bound, it is another score."""
        raise NotImplementedError


class _BoundDistance(AbstractScore):
    function: Bound

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        return logits + self.function(pairs.distance).astype(logits.dtype)


class Score(AbstractScore):
    """A function of one's own makes the new logits.

    **Arguments:**

    - `fn`: called as `fn(logit, batch, head, q_position, kv_position)`: logits, and
        four int32 arrays that broadcast to them; returns new logits of their shape. It
        has to treat each pair alone. Arrays that it needs are fields: then `fn` is an
        `eqx.Module` with a `__call__`, and they have gradients. A plain function is
        part of the compiled program: define it once, as a new one compiles anew.
    """

    fn: Callable[[Array, Array, Array, Array, Array], Array]

    def __init__(
        self, fn: Callable[[Array, Array, Array, Array, Array], Array]
    ) -> None:
        self.fn = own_function("Score.fn", fn)

    @override
    def __repr__(self) -> str:
        return f"Score({self.fn!r})"

    @override
    def bind(self, shape: LogitsShape) -> "AbstractScore":
        """With what is known of its results."""
        function, sizes = Bound.of(self.fn), (2, 3, 5, 7, 11)
        out = probe(
            "Score.fn",
            function,
            jax.ShapeDtypeStruct(sizes, jnp.float32),
            *(
                jax.ShapeDtypeStruct(size, jnp.int32)
                for size in (
                    (2, 1, 1, 1, 1),
                    (1, 3, 5, 1, 1),
                    (1, 1, 1, 7, 1),
                    (1, 1, 1, 1, 11),
                )
            ),
        )
        _check_result("Score.fn", out, sizes)
        batch = math.prod(shape.batch)
        return _BoundScore(function, jnp.arange(batch, dtype=jnp.int32))

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        """Bound, it is another score."""
        raise NotImplementedError


class _BoundScore(AbstractScore):
    """A function, and the number of each batch element."""

    function: Bound
    batch: Int[Array, " batch"]

    @override
    def modify(self, logits: Float[Array, "..."], pairs: Pairs) -> Float[Array, "..."]:
        batch = self.batch[:, None, None, None, None]
        out = self.function(
            *(logits, batch, pairs.tile.heads),
            *(pairs.q_position, pairs.kv_position),
        )
        return out.astype(logits.dtype)


def _check_result(name: str, out: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> None:
    """A function of scores returns floats, one for each pair."""
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(f"{name} returned {out.dtype}, but must return floats")
    if out.shape != shape:
        raise ValueError(
            f"{name} returned shape {out.shape} for logits of shape {shape}, but must "
            "return one number for each"
        )


def _whole(name: str, x: Number | Float[Array, "..."]) -> Float[Array, " batch"]:
    """A number with an axis in front."""
    x = jnp.asarray(x, None if isinstance(x, Array) else jnp.float32)
    if x.ndim:
        raise ValueError(f"{name} has shape {x.shape}, but must be a single number")
    return x[None]


def _heads_first(
    name: str, x: Float[Array, "..."], shape: LogitsShape, trailing: int = 0
) -> Float[Array, "1 kv_heads group ..."]:
    """`x`, whose first axis is q_heads or 1, with heads as in a tile."""
    if x.ndim == trailing:
        x = x[None]
    if x.ndim != trailing + 1 or x.shape[0] not in (1, shape.q_heads):
        raise ValueError(
            f"{name} has an axis of heads of {x.shape[0]}, but query has "
            f"{shape.q_heads} heads"
        )
    x = jnp.broadcast_to(x, (shape.q_heads, *x.shape[1:]))
    return x.reshape(1, shape.kv_heads, shape.group, *x.shape[1:])
