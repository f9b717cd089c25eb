"""Attention, its configuration, its backends, and the cache."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from . import reference
from .helpers import Arrays, check, close, normal, qkv, want

BACKENDS = (eqxa.Backend.AUTO, eqxa.Backend.STANDARD, eqxa.Backend.FLASH)
CONFIG = eqxa.AttentionConfig(
    causal=True,
    alignment=eqxa.Alignment.BOTTOM_RIGHT,
    sliding_window=(3, 0),
    softmax_scale=0.4,
    logits_soft_cap=1.2,
    num_sink_tokens=1,
)


def arrays(**shape: Any) -> Arrays:
    return {n: jnp.asarray(x) for n, x in qkv(**shape).items()}


def fields(config: eqxa.AttentionConfig) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(config)}
    names -= {"dropout_prob", "logits_dtype", "precision"}
    names -= {"normalizer", "differentiation"}
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_attention(backend: eqxa.Backend) -> None:
    """All of the configuration reaches the function, and so do all arrays."""
    extra = {
        "mask": normal(3, 2, 1, 6, 9) > -1,
        "bias": normal(4, 4, 1, 9),
        "softmax_aux": normal(5, 4, 2),
        "sink_bias": normal(6, 4, 1),
        "q_segment_ids": np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]]),
        "kv_segment_ids": np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 8 + [-1]]),
    }
    attend = eqxa.Attention(CONFIG, backend=backend)
    found = attend(**arrays(), **{n: jnp.asarray(x) for n, x in extra.items()})
    close("output", found, want(qkv() | extra, **fields(CONFIG)).output)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_attention_of_packed_sequences(backend: eqxa.Backend) -> None:
    extra = {"cum_seqlens_q": np.array([0, 2, 5]), "cum_seqlens_k": np.array([0, 4, 9])}
    attend = eqxa.Attention(CONFIG, backend=backend)
    found = attend(**arrays(), **{n: jnp.asarray(x) for n, x in extra.items()})
    close("output", found, want(qkv() | extra, **fields(CONFIG)).output)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_attention_function(backend: eqxa.Backend) -> None:
    def attend(*args: Any, **kwargs: Any) -> Any:
        return eqxa.attention(*args, backend=backend, **kwargs)

    check(attend, qkv() | {"bias": normal(3, 6, 9)}, causal=True)


def test_attention_in_decode() -> None:
    config = eqxa.AttentionConfig(causal=True, sliding_window=(3, 0))
    start, end = np.array([1, 0]), np.array([7, 9])
    for backend in (eqxa.Backend.AUTO, eqxa.Backend.RAGGED_DECODE):
        attend = eqxa.Attention(config, backend=backend)
        found = attend(
            **arrays(q_len=2),
            sequence_start=jnp.asarray(start),
            sequence_end=jnp.asarray(end),
        )
        expected = reference.decode(
            *qkv(q_len=2).values(), start, end, sliding_window=(3, 0)
        )
        close("output", found, expected.output)


def test_chunk_sizes_of_attention() -> None:
    attend = eqxa.Attention(
        CONFIG, backend=eqxa.Backend.FLASH, chunk_sizes=eqxa.ChunkSizes(query=2, key=3)
    )
    close("output", attend(**arrays()), want(qkv(), **fields(CONFIG)).output)


def test_dropout_only_in_training() -> None:
    config = eqxa.AttentionConfig(dropout_prob=0.5)
    attend = eqxa.Attention(config)
    key = jax.random.key(0)
    dropped = attend(**arrays(), dropout_key=key)
    plain = eqxa.Attention(eqxa.AttentionConfig())(**arrays())
    assert np.abs(dropped - plain).max() > 0.1
    np.testing.assert_array_equal(attend(**arrays(), inference=True), plain)
    np.testing.assert_array_equal(
        attend(**arrays(), dropout_key=key, inference=True), plain
    )
    inferring = eqx.nn.inference_mode(attend)
    np.testing.assert_array_equal(inferring(**arrays()), plain)
    np.testing.assert_array_equal(
        inferring(**arrays(), dropout_key=key, inference=False), dropped
    )
    with pytest.raises(ValueError, match="dropout_key"):
        attend(**arrays())
    with pytest.raises(ValueError, match="dropout_key"):
        attend(**arrays(), inference=False)


def test_attention_is_a_static_module() -> None:
    """It has no arrays: it is hashable, and equal to one that is made alike."""
    attend = eqxa.Attention(CONFIG)
    assert not any(eqx.is_array(leaf) for leaf in jax.tree.leaves(attend))
    assert hash(attend) == hash(eqxa.Attention(CONFIG))
    assert attend == eqxa.Attention(CONFIG)
    traced = 0

    @eqx.filter_jit
    def run(attend: eqxa.Attention, arrays: Arrays) -> Array:
        nonlocal traced
        traced += 1
        return attend(**arrays)

    run(attend, arrays())
    run(eqxa.Attention(dataclasses.replace(CONFIG)), arrays())
    assert traced == 1
    run(eqxa.Attention(dataclasses.replace(CONFIG, causal=False)), arrays())
    assert traced == 2


@pytest.mark.parametrize(
    "value",
    (CONFIG, eqxa.ChunkSizes(query=2, key=3), eqxa.Attention(CONFIG)),
    ids=lambda value: type(value).__name__,
)
def test_frozen(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))
    assert len({value, dataclasses.replace(value)}) == 1


WRONG: dict[str, Any] = {
    "causal": 1,
    "alignment": "top_left",
    "sliding_window": (-1, 0),
    "softmax_scale": "1",
    "logits_soft_cap": -2.0,
    "dropout_prob": 1.5,
    "num_sink_tokens": -1,
    "logits_dtype": jnp.int32,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_config(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        eqxa.AttentionConfig(**{name: WRONG[name]})


def test_enumerations() -> None:
    names = {backend.name for backend in eqxa.Backend}
    assert {"AUTO", "STANDARD", "FLASH", "RAGGED_DECODE"} <= names
    assert {a.name for a in eqxa.Alignment} == {"TOP_LEFT", "BOTTOM_RIGHT"}


def test_resolve_says_why() -> None:
    query, key, value = arrays().values()
    for backend in BACKENDS:
        choice = eqxa.resolve(query, key, value, backend=backend)
        assert choice.backend in (eqxa.Backend.STANDARD, eqxa.Backend.FLASH)
        assert len(choice.reason) > 10
        if backend is not eqxa.Backend.AUTO:
            assert choice.backend is backend


def test_resolve_by_what_is_asked() -> None:
    query, key, value = arrays(q_len=1).values()
    choice = eqxa.resolve(
        query,
        key,
        value,
        backend=eqxa.Backend.AUTO,
        sequence_end=jnp.asarray([3, 9]),
    )
    assert choice.backend is eqxa.Backend.RAGGED_DECODE


def test_resolve_by_size() -> None:
    """A matrix that would not fit is not made, and shapes are enough to know."""
    spec = jax.ShapeDtypeStruct
    for length, backend in (
        (8, eqxa.Backend.STANDARD),
        (384, eqxa.Backend.STANDARD),
        (385, eqxa.Backend.FLASH),
        (32768, eqxa.Backend.FLASH),
    ):
        query = key = spec((1, length, 2, 8), jnp.float32)
        chosen = eqxa.resolve(query, key, key)
        assert chosen.backend is backend
        assert str(length) in chosen.reason
    wide = spec((64, 384, 8, 8), jnp.float32)
    assert eqxa.resolve(wide, wide, wide).backend is eqxa.Backend.FLASH


@pytest.mark.parametrize(
    "options",
    (
        {"causal": True},
        {"bias": np.zeros((6, 9), np.float32)},
        {"dropout_prob": 0.5},
    ),
    ids=lambda options: next(iter(options)),
)
def test_a_backend_says_what_it_cannot_do(options: dict[str, Any]) -> None:
    """Decoding needs to know where sequences end."""
    if "dropout_prob" in options:
        options = options | {"dropout_key": jax.random.key(0)}
    named = {n: jnp.asarray(x) if n == "bias" else x for n, x in options.items()}
    with pytest.raises(ValueError, match=r"sequence_end|RAGGED_DECODE|ragged"):
        eqxa.attention(**arrays(), backend=eqxa.Backend.RAGGED_DECODE, **named)


def test_no_backend_ignores_the_end() -> None:
    """Where a sequence ends is either used or refused, never forgotten."""
    start, end = np.array([0, 2]), np.array([7, 4])
    expected = reference.decode(*qkv(q_len=2).values(), start, end).output
    for backend in (eqxa.Backend.STANDARD, eqxa.Backend.FLASH):
        attend = eqxa.Attention(eqxa.AttentionConfig(causal=True), backend=backend)
        try:
            found = attend(
                **arrays(q_len=2),
                sequence_start=jnp.asarray(start),
                sequence_end=jnp.asarray(end),
            )
        except ValueError as error:
            assert "sequence_" in str(error)
        else:
            close("output", found, expected)


# The cache.


def test_cache_grows() -> None:
    """Chunk after chunk, and the result is that of the whole."""
    whole = arrays(q_len=9, kv_len=9)
    expected = eqxa.standard_attention(**whole, causal=True)
    cache = eqxa.KVCache.init(2, 12, 2, 3, 5, dtype=jnp.float32)
    done = 0
    for length in (4, 1, 3, 1):
        part = {n: x[:, done : done + length] for n, x in whole.items()}
        cache = cache.append(part["key"], part["value"])
        done += length
        found = eqxa.ragged_decode_attention(
            part["query"],
            cache.key,
            cache.value,
            jnp.zeros_like(cache.lengths),
            cache.lengths,
        )
        np.testing.assert_array_equal(cache.lengths, [done, done])
        close("output", found, expected[:, done - length : done])


def test_ragged_cache() -> None:
    """Sequences of a batch grow by as many tokens as each has."""
    cache = eqxa.KVCache.init(2, 8, 2, 3, dtype=jnp.float32)
    tokens = normal(3, 2, 6, 2, 3)
    kept: list[list[Any]] = [[], []]
    for begin, counts in ((0, (2, 0)), (2, (1, 2)), (4, (2, 1))):
        chunk = tokens[:, begin : begin + 2]
        cache = cache.append(
            jnp.asarray(chunk), jnp.asarray(2 * chunk), num_tokens=jnp.asarray(counts)
        )
        for i, count in enumerate(counts):
            kept[i].extend(chunk[i, :count])
    np.testing.assert_array_equal(cache.lengths, [5, 3])
    for i in range(2):
        stored = np.asarray(cache.key)[i, : len(kept[i])]
        np.testing.assert_array_equal(stored, np.array(kept[i]))
        stored = np.asarray(cache.value)[i, : len(kept[i])]
        np.testing.assert_array_equal(stored, 2 * np.array(kept[i]))


def test_cache_in_place() -> None:
    """Under jit, with the old cache donated, as one generates."""
    cache = eqxa.KVCache.init(2, 8, 2, 3, dtype=jnp.bfloat16)

    @eqx.filter_jit(donate="all")
    def step(cache: eqxa.KVCache, key: Array, value: Array) -> eqxa.KVCache:
        return cache.append(key, value)

    for i in range(3):
        chunk = jnp.full((2, 1, 2, 3), i + 1, jnp.bfloat16)
        cache = step(cache, chunk, jnp.copy(chunk))
    np.testing.assert_array_equal(cache.lengths, [3, 3])
    stored = np.asarray(cache.key[0, :3, 0, 0], np.float32)
    np.testing.assert_array_equal(stored, [1, 2, 3])
    assert cache.key.dtype == jnp.bfloat16


def test_cache_in_scan() -> None:
    cache = eqxa.KVCache.init(2, 8, 2, 3, dtype=jnp.float32)
    chunks = jnp.asarray(normal(3, 5, 2, 1, 2, 3))

    def step(cache: eqxa.KVCache, chunk: Array) -> tuple[eqxa.KVCache, None]:
        return cache.append(chunk, chunk), None

    cache, _ = jax.jit(lambda cache: jax.lax.scan(step, cache, chunks))(cache)
    np.testing.assert_array_equal(cache.key[:, :5], jnp.swapaxes(chunks[:, :, 0], 0, 1))


# The shapes of keys and of values that a cache of `2 8 2 3` cannot take.
WRONG_TOKENS = {
    "batch": ((3, 1, 2, 3), (3, 1, 2, 3)),
    "heads": ((2, 1, 1, 3), (2, 1, 1, 3)),
    "width": ((2, 1, 2, 4), (2, 1, 2, 3)),
    "value's length": ((2, 2, 2, 3), (2, 1, 2, 3)),
    "more than the capacity": ((2, 9, 2, 3), (2, 9, 2, 3)),
}


@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_wrong_tokens(case: str) -> None:
    cache = eqxa.KVCache.init(2, 8, 2, 3, dtype=jnp.float32)
    with pytest.raises((ValueError, TypeError)):
        cache.append(*(jnp.zeros(shape) for shape in WRONG_TOKENS[case]))
