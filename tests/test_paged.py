"""A cache in pages is the cache that one gets by laying the pages in a row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from . import reference
from .helpers import Arrays, close, normal

pytestmark = pytest.mark.numbers

PAGE_SIZE, NUM_PAGES = 4, 10
TABLE = np.array([[7, 2, 5], [0, 9, 3], [4, 8, 6]])
START, END = np.array([0, 3, 5]), np.array([12, 6, 5])


def pages(q_len: int = 2) -> Arrays:
    return {
        "query": normal(1, 3, q_len, 4, 3),
        "key_pages": normal(2, NUM_PAGES, PAGE_SIZE, 2, 3),
        "value_pages": normal(3, NUM_PAGES, PAGE_SIZE, 2, 5),
    }


def attend(
    arrays: Arrays,
    table: Any = TABLE,
    start: Any = START,
    end: Any = END,
    **options: Any,
) -> tuple[Array, Array]:
    named = {n: jnp.asarray(x) for n, x in arrays.items()}
    positional = (named.pop(n) for n in ("query", "key_pages", "value_pages"))
    integers = (jnp.asarray(x) for x in (table, start, end))
    return eqxa.paged_decode_attention(
        *positional, *integers, return_lse=True, **named, **options
    )


def check(
    arrays: Arrays,
    table: Any = TABLE,
    start: Any = START,
    end: Any = END,
    **options: Any,
) -> np.ndarray:
    output, lse = jax.jit(lambda a, *i: attend(a, *i, **options))(
        {n: jnp.asarray(x) for n, x in arrays.items()},
        *(jnp.asarray(x) for x in (table, start, end)),
    )
    named = dict(arrays)
    query = named.pop("query")
    key = reference.gather_pages(named.pop("key_pages"), table)
    value = reference.gather_pages(named.pop("value_pages"), table)
    expected = reference.decode(query, key, value, start, end, **named, **options)
    close("output", output, expected.output)
    close("lse", lse, expected.lse)
    return np.asarray(output)


OPTIONS: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({}, {"sliding_window": (4, 0)}),
    "window and sink tokens": (
        {"sink_bias": normal(4, 4, 1)},
        {"sliding_window": (2, 0), "num_sink_tokens": 1},
    ),
    "sinks": ({"softmax_aux": normal(5, 4, 2)}, {}),
    "soft cap and scale": ({}, {"logits_soft_cap": 0.7, "softmax_scale": 0.9}),
    "mask": ({"mask": normal(6, 3, 1, 1, 12) > -0.5}, {}),
    "bias": ({"bias": normal(7, 4, 1, 12)}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    extra, options = OPTIONS[name]
    start = 0 * START if "num_sink_tokens" in options else START
    check(pages() | extra, start=start, **options)


def test_one_token() -> None:
    arrays = pages()
    arrays["query"] = arrays["query"][:, 0]
    assert check(arrays).shape == (3, 4, 5)


def test_pages_nobody_refers_to_hold_garbage() -> None:
    arrays = pages()
    clean = check(arrays)
    arrays["key_pages"][1] = arrays["value_pages"][1] = np.nan
    # Of the second sequence only the slots [3, 6) are alive, of the third none.
    for page, slots in ((0, slice(0, 3)), (9, slice(2, 4)), (3, slice(None))):
        arrays["key_pages"][page, slots] = np.nan
        arrays["value_pages"][page, slots] = np.inf
    arrays["key_pages"][[4, 8, 6]] = arrays["value_pages"][[4, 8, 6]] = np.nan
    np.testing.assert_array_equal(check(arrays), clean)


@pytest.mark.parametrize("unused", (-1, NUM_PAGES + 5, 1), ids=("-1", "beyond", "any"))
def test_entries_past_the_end_are_not_read(unused: int) -> None:
    arrays = pages()
    arrays["key_pages"][1] = arrays["value_pages"][1] = np.nan
    table = np.array([[7, 2, 5], [0, 9, unused], [unused] * 3])
    check(arrays, table)


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.uint32), ids=str)
def test_offsets_do_not_overflow_the_table(dtype: Any) -> None:
    """Page 100 times 4 slots is more than an int8 holds."""
    arrays = {
        "query": normal(1, 1, 2, 4, 3),
        "key_pages": normal(2, 101, PAGE_SIZE, 2, 3),
        "value_pages": normal(3, 101, PAGE_SIZE, 2, 5),
    }
    table = np.array([[100, 99, 70]], dtype)
    check(arrays, table, np.array([1]), np.array([11]))


def test_pages_may_be_shared() -> None:
    """A common prefix is stored once."""
    check(pages(), np.array([[7, 2, 5], [7, 2, 3], [7, 8, 6]]), np.zeros(3, int), END)


def test_no_batch_and_two_batch_axes() -> None:
    arrays = pages()
    arrays["query"] = arrays["query"][0]
    check(arrays, TABLE[0], START[0], END[0])
    arrays["query"] = normal(8, 3, 1, 2, 4, 3)
    check(arrays, TABLE[:, None], START[:, None], END[:, None])


def test_gradients_are_those_of_the_pages_in_a_row() -> None:
    arrays = {n: jnp.asarray(x) for n, x in pages().items()}
    arrays["softmax_aux"] = jnp.asarray(normal(5, 4, 1))
    weights = jnp.asarray(normal(9, 3, 2, 4, 5))

    def paged(arrays: Arrays) -> Array:
        output, lse = attend(arrays)
        return jnp.vdot(output, weights) + jnp.sum(lse)

    def in_a_row(arrays: Arrays) -> Array:
        def lay(pages: Array) -> Array:
            return pages[TABLE].reshape(3, 12, 2, pages.shape[-1])

        output, lse = eqxa.ragged_decode_attention(
            arrays["query"],
            lay(arrays["key_pages"]),
            lay(arrays["value_pages"]),
            jnp.asarray(START),
            jnp.asarray(END),
            softmax_aux=arrays["softmax_aux"],
            return_lse=True,
        )
        return jnp.vdot(output, weights) + jnp.sum(lse)

    found, expected = (
        jax.jit(jax.grad(paged))(arrays),
        jax.jit(jax.grad(in_a_row))(arrays),
    )
    for name in arrays:
        close(name, found[name], expected[name])
        assert np.abs(np.asarray(found[name])).max() > 0


def test_a_narrower_cache() -> None:
    arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in pages().items()}
    arrays["query"] = arrays["query"].astype(jnp.float32)
    output, _ = attend(arrays)
    assert output.dtype == jnp.float32
