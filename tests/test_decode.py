"""New tokens against a cache of which the part [start, end) is alive."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa
from eqx_attention.functional import _decode_core

from . import reference
from .helpers import DIFFERENTIABLE, Arrays, close, flash, normal, qkv

pytestmark = pytest.mark.numbers

START, END = np.array([0, 2, 4, 0]), np.array([11, 7, 4, 1])
BLOCKS = (None, 1, 4, 11, 64)


def cache(q_len: int = 2, **shape: Any) -> Arrays:
    """Four sequences in a cache of eleven slots."""
    return qkv(100, batch=(4,), q_len=q_len, kv_len=11, **shape)


def decode(arrays: Arrays, start: Any = START, end: Any = END, **options: Any) -> Any:
    """Results and gradients of everything, as NumPy arrays."""
    arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
    trained = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
    given = {n: x for n, x in arrays.items() if n not in DIFFERENTIABLE}
    d_output, d_lse = cotangents(arrays)

    @jax.jit
    def run(trained: Arrays, given: Arrays, start: Array, end: Array) -> Any:
        def function(trained: Arrays) -> tuple[Array, Array]:
            named = {**trained, **given}
            query, key, value = (named.pop(n) for n in ("query", "key", "value"))
            return eqxa.ragged_decode_attention(
                query, key, value, start, end, return_lse=True, **named, **options
            )

        (output, lse), pullback = jax.vjp(function, trained)
        (grads,) = pullback((d_output.astype(output.dtype), d_lse.astype(lse.dtype)))
        return output, lse, grads

    return jax.tree.map(
        np.asarray, run(trained, given, jnp.asarray(start), jnp.asarray(end))
    )


def cotangents(arrays: Arrays) -> tuple[Array, Array]:
    query, value = arrays["query"], arrays["value"]
    shape = (*query.shape[:-1], value.shape[-1])
    lse_shape = (*query.shape[:-3], query.shape[-2], query.shape[-3])
    if query.ndim == value.ndim - 1:
        lse_shape = query.shape[:-1]
    return jnp.asarray(normal(90, *shape)), jnp.asarray(normal(91, *lse_shape))


def check(arrays: Arrays, start: Any = START, end: Any = END, **options: Any) -> Any:
    found = decode(arrays, start, end, **options)
    output, lse, grads = found
    known = {n: x for n, x in options.items() if n != "block_size"}
    named = dict(arrays)
    query, key, value = (named.pop(n) for n in ("query", "key", "value"))
    expected = reference.decode(query, key, value, start, end, **named, **known)
    close("output", output, expected.output)
    close("lse", lse, expected.lse)
    d_output, d_lse = (np.asarray(x) for x in cotangents(arrays))
    if query.ndim == key.ndim - 1:
        query, d_output, d_lse = query[:, None], d_output[:, None], d_lse[..., None]
    slopes = reference.gradients(
        query,
        key,
        value,
        d_output,
        d_lse,
        causal=True,
        query_offset=end - query.shape[1],
        sequence_start=start,
        sequence_end=end,
        **named,
        **known,
    )
    for name, gradient in grads.items():
        close(name, gradient, slopes[name].reshape(gradient.shape))
    return found


ARRAYS: dict[str, Arrays] = {
    "softmax_aux": {"softmax_aux": normal(3, 4, 2)},
    "softmax_aux for all heads": {"softmax_aux": normal(3, 1)},
    "sink_bias": {"sink_bias": normal(4, 4, 2)},
    "mask": {"mask": normal(5, 4, 1, 2, 11) > -0.5},
    "mask over keys": {"mask": normal(5, 11) > -0.5},
    "bias": {"bias": normal(6, 4, 1, 11)},
    "softmax_scale": {"softmax_scale": np.float32(0.3)},
}
STATIC: dict[str, dict[str, Any]] = {
    "sink_bias": {"num_sink_tokens": 2},
    "window": {"sliding_window": (2, 0)},
    "window, an int": {"sliding_window": 3},
    "window and sink tokens": {"sliding_window": (1, 0), "num_sink_tokens": 2},
    "soft cap": {"logits_soft_cap": 0.8},
}
OPTIONS = sorted({**ARRAYS, **STATIC})


@pytest.mark.parametrize("q_len", (2, 5))
@pytest.mark.parametrize("block_size", BLOCKS)
def test_several_tokens(block_size: int | None, q_len: int) -> None:
    check(cache(q_len), block_size=block_size)


@pytest.mark.parametrize("block_size", (None, 4))
def test_one_token(block_size: int | None) -> None:
    arrays = cache(q_len=1)
    arrays["query"] = arrays["query"][:, 0]
    check(arrays, block_size=block_size)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str) -> None:
    options = STATIC.get(option, {})
    start = 0 * START if "num_sink_tokens" in options else START
    check(cache() | ARRAYS.get(option, {}), start, block_size=4, **options)


@pytest.mark.parametrize("lanes", (1, 3, 64))
@pytest.mark.parametrize("block_size", (5, 64))
def test_all_options(
    monkeypatch: pytest.MonkeyPatch, block_size: int, lanes: int
) -> None:
    """Whether blocks are read one by one or side by side, as where cores are many."""
    monkeypatch.setattr(_decode_core, "_LANES", lanes)
    monkeypatch.setattr(_decode_core, "on_cpu", lambda: False)
    jax.clear_caches()  # of what was compiled for another number
    arrays = cache()
    for extra in ("softmax_aux", "sink_bias", "mask", "bias", "softmax_scale"):
        arrays |= ARRAYS[extra]
    options = STATIC["window and sink tokens"] | STATIC["soft cap"]
    check(arrays, 0 * START, block_size=block_size, **options)


def test_sink_tokens_are_the_first_of_each_sequence() -> None:
    """They count from the start of the sequence, not of the cache."""
    arrays = cache() | {"sink_bias": normal(4, 4, 3)}
    start = np.array([0, 2, 4, 1])
    check(arrays, start, num_sink_tokens=3, sliding_window=(1, 0), block_size=4)


@pytest.mark.parametrize("block_size", (None, 4))
def test_slots_outside_hold_garbage(block_size: int | None) -> None:
    arrays = cache()
    clean = decode(arrays, block_size=block_size)
    for i, (start, end) in enumerate(zip(START, END, strict=True)):
        for name, garbage in (("key", np.nan), ("value", np.inf)):
            arrays[name][i, :start] = garbage
            arrays[name][i, end:] = garbage
    found = check(arrays, block_size=block_size)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("block_size", (None, 4))
def test_empty_sequences(block_size: int | None) -> None:
    output, lse, grads = check(cache(), START, START, block_size=block_size)
    assert not output.any()
    assert np.isneginf(lse).all()
    assert not any(x.any() for x in grads.values())


def test_more_tokens_than_the_sequence_has() -> None:
    """The first of them stand before its start and see nothing."""
    output, _, _ = check(
        cache(q_len=3), np.array([0, 5, 9, 1]), np.array([2, 6, 11, 1])
    )
    assert not output[0, 0].any()
    assert not output[1, :2].any()
    assert output[1, 2].any()


@pytest.mark.parametrize("block_size", (None, 4))
def test_steps_are_the_rows_of_one_pass(block_size: int | None) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv(batch=(2,), q_len=6, kv_len=6).items()}
    rows = eqxa.standard_attention(**arrays, causal=True, sliding_window=(3, 0))

    @jax.jit
    def step(query: Array, end: Array) -> Array:
        start = jnp.zeros(2, jnp.int32)
        return eqxa.ragged_decode_attention(
            query,
            arrays["key"],
            arrays["value"],
            start,
            end,
            sliding_window=(3, 0),
            block_size=block_size,
        )

    for i in range(6):
        found = step(arrays["query"][:, i], jnp.full(2, i + 1, jnp.int32))
        np.testing.assert_allclose(found, rows[:, i], rtol=1e-5, atol=1e-6)


def test_drafts_do_not_see_later_drafts() -> None:
    """Several tokens at once are one token after the other."""
    arrays = {n: jnp.asarray(x) for n, x in cache(q_len=3).items()}
    start, end = jnp.asarray([0, 1, 2, 3]), jnp.asarray([11, 7, 5, 6])
    query, key, value = arrays.values()
    attend = jax.jit(eqxa.ragged_decode_attention)
    at_once = attend(query, key, value, start, end)
    for t in range(3):
        alone = attend(query[:, t], key, value, start, end - (2 - t))
        np.testing.assert_allclose(at_once[:, t], alone, rtol=1e-5, atol=1e-6)


def test_window_counts_from_the_end() -> None:
    """Older keys change nothing, bit for bit."""
    arrays = {n: jnp.asarray(x) for n, x in cache(q_len=1).items()}
    query, key, value = arrays.values()
    start, end = jnp.zeros(4, jnp.int32), jnp.asarray([11, 8, 9, 10])

    @jax.jit
    def attend(key: Array, value: Array) -> Array:
        return eqxa.ragged_decode_attention(
            query, key, value, start, end, sliding_window=(2, 0), block_size=4
        )

    changed = key.at[:, :5].add(9.0), value.at[:, :5].add(9.0)
    np.testing.assert_array_equal(attend(key, value), attend(*changed))
    changed = key.at[1, 5].add(9.0), value.at[1, 5].add(9.0)
    assert np.abs(attend(key, value) - attend(*changed))[1].max() > 1e-3


@pytest.mark.parametrize("batch", ((), (2, 2), (0,)), ids=str)
def test_batch_axes(batch: tuple[int, ...]) -> None:
    arrays = qkv(batch=batch, q_len=2)
    start = np.arange(int(np.prod(batch, dtype=int))).reshape(batch)
    query, key, value = (jnp.asarray(x) for x in arrays.values())
    output, lse = eqxa.ragged_decode_attention(
        query, key, value, jnp.asarray(start), jnp.asarray(start + 5), return_lse=True
    )
    expected = reference.decode(*arrays.values(), start, start + 5)
    close("output", output, expected.output)
    close("lse", lse, expected.lse)


@pytest.mark.parametrize("dtype", (np.int64, np.int16), ids=str)
def test_any_integers(dtype: Any, x64: None) -> None:
    arrays = cache()
    output, _, _ = decode(arrays, START.astype(dtype), END.astype(dtype))
    assert output.dtype == np.float32
    close("output", output, reference.decode(*arrays.values(), START, END).output)


def test_a_narrower_cache() -> None:
    """A cache in bfloat16 under a query in float32 is right, and the output float32."""
    arrays = {n: jnp.asarray(x) for n, x in cache().items()}
    arrays |= {n: arrays[n].astype(jnp.bfloat16) for n in ("key", "value")}
    output, _, grads = decode(arrays)
    assert output.dtype == np.float32
    assert grads["key"].dtype == jnp.bfloat16
    expected = reference.decode(*arrays.values(), START, END)
    close("output", output, expected.output, 1e-4)


def test_under_vmap() -> None:
    arrays = {n: jnp.asarray(x) for n, x in cache().items()}
    start, end = jnp.asarray(START), jnp.asarray(END)

    def attend(
        query: Array, key: Array, value: Array, start: Array, end: Array
    ) -> Array:
        return eqxa.ragged_decode_attention(query, key, value, start, end, block_size=4)

    mapped = jax.jit(jax.vmap(attend))(*arrays.values(), start, end)
    np.testing.assert_allclose(
        mapped, attend(*arrays.values(), start, end), rtol=1e-5, atol=1e-6
    )


def test_a_prompt_in_chunks_is_flash() -> None:
    """The last tokens of a sequence are also those of a query with an offset."""
    arrays = {n: jnp.asarray(x) for n, x in cache(q_len=4).items()}
    query, key, value = arrays.values()
    end = jnp.asarray([11, 7, 4, 9])
    found = eqxa.ragged_decode_attention(
        query, key, value, jnp.zeros(4, jnp.int32), end
    )
    expected = flash(4, 4)(query, key, value, causal=True, query_offset=end - 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
