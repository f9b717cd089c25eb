"""One attention as the backends see it, and how much of it a tile holds."""

import os

import equinox as eqx
from jaxtyping import Array, DTypeLike, Float, PyTree

from .._config import ChunkSizes
from .._jax import accumulation_dtype, on_cpu
from ._dropout import Dropout
from ._logits import LogitRules
from ._score import AbstractScore, ScoreParameters
from ._tiles import TileSizes
from ._visibility import Visibility


def tile_capacity() -> int:
    """How many logits a CPU takes at a time: 1 MiB of float32 for each core."""
    return 2**18 * (os.cpu_count() or 1)


class Operands(eqx.Module):
    """All that has a gradient, heads before lengths, batch axes made one."""

    query: Float[Array, "batch kv_heads group q_len qk_dim"]
    key: Float[Array, "batch kv_heads kv_len qk_dim"]
    value: Float[Array, "batch kv_heads kv_len v_dim"]
    parameters: ScoreParameters

    @property
    def accumulator(self) -> DTypeLike:
        """The dtype of running sums: float32 or wider."""
        return accumulation_dtype(self.query, self.key, self.value)

    @property
    def query_scale(self) -> Float[Array, ""] | None:
        """The scale if it goes into the query, made wide: that is one pass less.

        Other devices than a CPU multiply narrow queries faster, and scale on the way.
        """
        wide = self.query.dtype == accumulation_dtype(self.query)
        return self.parameters.scale if wide or on_cpu() else None

    def with_scaled_query(self) -> "Operands":
        """The same with the scale in the query, if it goes there."""
        if (scale := self.query_scale) is None:
            return self
        query = self.query.astype(scale.dtype) * scale
        parameters = self.parameters.without_scale()
        return Operands(query, self.key, self.value, parameters)


class Problem(eqx.Module):
    """One attention, as the backends see it."""

    operands: Operands
    rules: LogitRules
    dropout: Dropout | None

    @property
    def is_empty(self) -> bool:
        """True if there is no batch, no query or no key."""
        return 0 in (*self.operands.query.shape[:4], self.operands.key.shape[2])

    def tile_sizes(self, chunk_sizes: ChunkSizes) -> TileSizes:
        """Chunks no longer than the lengths, and how many heads to take at a time.

        On a CPU few enough that a tile stays in the caches: with 8 heads at a time
        instead of 2, chunks of 512 x 512, the second product of a tile runs at half its
        speed. Other devices want all the work at once.
        """
        _, kv_heads, group, q_len, _ = self.operands.query.shape
        query = min(chunk_sizes.query, q_len)
        key = min(chunk_sizes.key, self.operands.key.shape[2])
        if on_cpu():
            most = max(tile_capacity() // (group * query * key), 1)
            kv_heads = max(
                n for n in range(1, kv_heads + 1) if n <= most and kv_heads % n == 0
            )
        return TileSizes(kv_heads, query, key)

    def walks_apart(self, sizes: TileSizes) -> bool:
        """True if batch elements take their chunks one element after the other.

        They do where they differ in the chunks that hold work, or fill the caches.
        """
        batch, kv_heads, group, q_len, _ = self.operands.query.shape
        one_chunk = q_len <= sizes.query and self.operands.key.shape[2] <= sizes.key
        if self.rules.visibility.differs_in_batch and not one_chunk:
            return True
        logits = batch * kv_heads * group * sizes.query * sizes.key
        return on_cpu() and logits > tile_capacity() and batch > 1

    @property
    def by_element(self) -> tuple[PyTree, ...]:
        """All that has a batch axis, of size 1 or `batch`."""
        operands, dropout = self.operands, self.dropout
        return (
            operands.query,
            operands.key,
            operands.value,
            operands.parameters.score,
            self.rules.visibility,
            None if dropout is None else dropout.batch_index,
        )

    def element(
        self,
        query: Array,
        key: Array,
        value: Array,
        score: AbstractScore | None,
        visibility: Visibility,
        batch_index: Array | None,
    ) -> "Problem":
        """One element, from what `by_element` has of it."""
        parameters, dropout = self.operands.parameters, self.dropout
        parameters = ScoreParameters(parameters.scale, score)
        if dropout is not None and batch_index is not None:
            dropout = Dropout(dropout.key, batch_index, dropout.prob)
        return Problem(
            Operands(query, key, value, parameters),
            self.rules.with_visibility(visibility),
            dropout,
        )

    def with_query(
        self, query: Float[Array, "batch kv_heads group q_size qk_dim"]
    ) -> "Problem":
        """The same with other queries, such as a part of them."""
        operands = self.operands
        operands = Operands(query, operands.key, operands.value, operands.parameters)
        return Problem(operands, self.rules, self.dropout)
