"""One step of decoding: a token of each sequence against what a cache holds of it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Prompt and generated tokens of 16 conversations, rows 100 to 115 (from 0) of the Azure
# LLM inference trace 2023 (conversation), github.com/Azure/AzurePublicDataset, CC-BY
# 4.0; Patel et al. 2024, "Splitwise", ISCA.
TRACE = (
    *(1292, 1611, 1302, 387, 393, 504, 1589, 257),
    *(1469, 1496, 1500, 1553, 1528, 1479, 1486, 1283),
)


def even(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """As many lengths with the same sum, as equal as they can be."""
    each, left = divmod(sum(lengths), len(lengths))
    return tuple(each + (i < left) for i in range(len(lengths)))


class DecodeArrays(NamedTuple):
    """The arguments of one step; the pages hold what `key` and `value` hold."""

    query: Array
    key: Array
    value: Array
    start: Array
    end: Array
    key_pages: Array
    value_pages: Array
    page_table: Array


@dataclasses.dataclass(frozen=True)
class Decoding:
    """One step of decoding: the lengths of its sequences, and the cache's shape."""

    lengths: tuple[int, ...]
    capacity: int = 8192
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "float32"

    def arrays(self, seed: int = 0) -> DecodeArrays:
        """Random arguments; all slots of the cache are filled."""
        batch, dim = len(self.lengths), self.head_dim
        q_shape = (batch, self.q_heads, dim)
        kv_shape = (batch, self.capacity, self.kv_heads, dim)
        query, key, value = (
            jax.random.normal(key, shape, self.dtype)
            for key, shape in zip(
                jax.random.split(jax.random.key(seed), 3),
                (q_shape, kv_shape, kv_shape),
                strict=True,
            )
        )
        table, rows, pages = self._page_table(seed)

        def as_pages(x: Array) -> Array:
            in_rows = x.reshape(batch, -1, self.page_size, self.kv_heads, dim)
            return in_rows[rows, pages]

        return DecodeArrays(
            *(query, key, value),
            start=jnp.zeros(batch, jnp.int32),
            end=jnp.asarray(self.lengths, jnp.int32),
            key_pages=as_pages(key),
            value_pages=as_pages(value),
            page_table=jnp.asarray(table),
        )

    def num_valid(self) -> int:
        """The numbers in the keys and values that the sequences see."""
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim

    def _page_table(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A table of pages in no order; and for each page its row and place there."""
        counts = -(-np.array(self.lengths) // self.page_size)
        rows = np.repeat(np.arange(len(counts)), counts)
        pages = np.concatenate([np.arange(count) for count in counts])
        order = np.random.default_rng(seed).permutation(len(rows))
        rows, pages = rows[order], pages[order]
        shape = (len(counts), self.capacity // self.page_size)
        table = np.zeros(shape, np.int32)
        table[rows, pages] = np.arange(len(rows))
        return table, rows, pages
