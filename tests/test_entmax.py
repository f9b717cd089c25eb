"""Attention with sparse weights."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import FEW_BACKENDS, Arrays, close, flash, normal, qkv
from .test_composition import ARRAYS, ROWS

pytestmark = pytest.mark.numbers

ALPHAS = np.array([1.05, 1.3, 1.5, 2.0], np.float32)
SEGMENTS = np.array([[0, 0, 1, 1, 1, -1], [-1, 0, 0, 0, 2, 2]])
# What is given beside query, key and value, and the options.
CASES: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "bias and causal": (
        {"bias": normal(3, 4, 1, 9), "softmax_scale": np.float32(1.5)},
        {"causal": True, "logits_soft_cap": 2.0},
    ),
    "window": (
        {"sink_bias": normal(4, 4, 1)},
        {"causal": True, "sliding_window": (2, 0), "num_sink_tokens": 1},
    ),
    "offsets": ({"query_offset": np.array([3, -2])}, {"causal": True}),
    "mask": ({"mask": normal(26, 2, 4, 6, 9) > 0}, {}),
    "segments": (
        {"q_segment_ids": SEGMENTS, "kv_segment_ids": np.repeat(SEGMENTS, 2, 1)[:, :9]},
        {},
    ),
    "packed": (
        {"cum_seqlens_q": np.array([0, 2, 5]), "cum_seqlens_k": np.array([0, 4, 7])},
        {"causal": True},
    ),
    "dropout": ({}, {"dropout_prob": 0.3, "dropout_key": jax.random.key(5)}),
}
TRAINED = ("query", "key", "value", "bias", "sink_bias", "softmax_scale")


def as_arrays(arrays: Arrays) -> Arrays:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def rows(logits: np.ndarray, alpha: float) -> np.ndarray:
    """Entmax of each row, its threshold by bisection."""
    z = (alpha - 1) * (logits - logits.max(axis=-1, keepdims=True))
    low, high = np.full(z.shape[:-1], -1.0), np.zeros(z.shape[:-1])
    for _ in range(100):
        tau = (low + high) / 2
        mass = np.sum(np.maximum(z - tau[..., None], 0) ** (1 / (alpha - 1)), axis=-1)
        low, high = np.where(mass > 1, tau, low), np.where(mass > 1, high, tau)
    return np.maximum(z - low[..., None], 0) ** (1 / (alpha - 1))


def sparsemax(logits: np.ndarray) -> np.ndarray:
    """By sorting (Martins & Astudillo 2016, algorithm 1)."""
    ordered = -np.sort(-logits, axis=-1)
    sums, count = np.cumsum(ordered, axis=-1), np.arange(1, logits.shape[-1] + 1)
    support = np.sum(1 + count * ordered > sums, axis=-1, keepdims=True)
    tau = (np.take_along_axis(sums, support - 1, axis=-1) - 1) / support
    return np.maximum(logits - tau, 0)


def entmax15(logits: np.ndarray) -> np.ndarray:
    """By sorting (Peters et al. 2019, algorithm 2)."""
    z = logits / 2
    ordered = -np.sort(-z, axis=-1)
    count = np.arange(1, z.shape[-1] + 1)
    mean = np.cumsum(ordered, axis=-1) / count
    spread = count * (np.cumsum(ordered**2, axis=-1) / count - mean**2)
    tau = mean - np.sqrt(np.maximum((1 - spread) / count, 0))
    support = np.sum(tau <= ordered, axis=-1, keepdims=True)
    return np.maximum(z - np.take_along_axis(tau, support - 1, axis=-1), 0) ** 2


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def weights_of(logits: np.ndarray, normalizer: eqxa.Softmax | eqxa.Entmax) -> Array:
    """The weights of logits that are products with unit vectors."""
    query = jnp.asarray(logits, jnp.float32)[:, None]
    key = jnp.eye(logits.shape[-1])[:, None]
    _, weights = eqxa.standard_attention(
        *(query, key, key),
        normalizer=normalizer,
        softmax_scale=1.0,
        return_weights=True,
    )
    return weights[0]


@pytest.mark.parametrize("spread", (0.1, 1.0, 30.0))
def test_closed_forms(spread: float) -> None:
    logits = normal(0, 5, 40, std=spread).astype(np.float64)
    for alpha, closed in ((2.0, sparsemax), (1.5, entmax15), (1.2, None)):
        found = np.asarray(weights_of(logits, eqxa.Entmax(alpha)))
        expected = rows(logits, alpha)
        if closed is not None:
            np.testing.assert_allclose(closed(logits), expected, atol=1e-9)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-6)
        if spread > 0.1 or alpha == 2:
            assert (found == 0).any()


def test_tends_to_softmax() -> None:
    logits = normal(1, 5, 40).astype(np.float64)
    expected = softmax(logits)
    errors = [
        np.abs(np.asarray(weights_of(logits, eqxa.Entmax(alpha))) - expected).max()
        for alpha in (1.1, 1.01, 1.001)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2] > 0
    assert errors[2] < 2e-3


def test_standard_attention() -> None:
    """Heads in groups, each query head with an alpha of its own."""
    arrays = qkv()
    logits = np.einsum(
        "bqkgd,bskd->bkgqs", arrays["query"].reshape(2, 6, 2, 2, 3), arrays["key"]
    ).reshape(2, 4, 6, 9) / np.sqrt(3)
    weights = np.stack(
        [rows(logits[:, h].astype(np.float64), float(a)) for h, a in enumerate(ALPHAS)],
        axis=1,
    )
    values = np.repeat(arrays["value"], 2, axis=2)
    found, found_weights = eqxa.standard_attention(
        **as_arrays(arrays),
        normalizer=eqxa.Entmax(jnp.asarray(ALPHAS)),
        return_weights=True,
    )
    close("weights", found_weights, weights, 1e-5)
    close("output", found, np.einsum("bhqs,bshd->bqhd", weights, values), 1e-5)


def value_and_grad(
    attend: Callable[..., Array], given: Arrays, **options: Any
) -> tuple[Array, Arrays]:
    """The output, and the gradient of a number made of it."""
    arrays = as_arrays(qkv() | {"alpha": ALPHAS} | given)
    others = {n: x for n, x in arrays.items() if n not in (*TRAINED, "alpha")}

    def loss(trained: Arrays) -> tuple[Array, Array]:
        named = dict(trained)
        normalizer = eqxa.Entmax(named.pop("alpha"))
        out = attend(**named, **others, **options, normalizer=normalizer)
        return jnp.sum(jnp.sin(out)), out

    trained = {n: x for n, x in arrays.items() if n in (*TRAINED, "alpha")}
    grads, out = jax.jit(jax.grad(loss, has_aux=True))(trained)
    return out, grads


@pytest.mark.parametrize("case", CASES)
def test_flash_attention(case: str) -> None:
    """What standard attention gives, and all its gradients."""
    given, options = CASES[case]
    out, grads = value_and_grad(flash(4, 4), given, **options)
    expected, slopes = value_and_grad(eqxa.standard_attention, given, **options)
    close("output", out, expected, 1e-5)
    for name, slope in slopes.items():
        close(f"gradient of {name}", grads[name], slope, 1e-4)
        assert np.abs(np.asarray(slope)).max() > 1e-3


@pytest.mark.parametrize(("backend", "order"), (("standard", 2), ("flash-4x4", 1)))
def test_finite_differences(backend: str, order: int, x64: None) -> None:
    """In both modes, and the mixtures of the two in second order."""
    arrays = qkv(
        *(9,), batch=(), q_len=2, kv_len=5, q_heads=2, kv_heads=1, dtype=np.float64
    )
    arrays["alpha"] = np.array([1.3, 1.7])
    mask = jnp.asarray([[True] * 4 + [False], [False] * 5])

    def function(arrays: Arrays) -> Array:
        named = dict(arrays)
        normalizer = eqxa.Entmax(named.pop("alpha"))
        return FEW_BACKENDS[backend](**named, mask=mask, normalizer=normalizer)

    check_grads(
        jax.jit(function),
        (as_arrays(arrays),),
        order=order,
        modes=["fwd", "rev"],
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_rows_without_keys_are_zero(backend: str) -> None:
    """Keys that no query sees may hold NaN, and so may queries that see none."""
    arrays = qkv()
    seen = np.arange(9) % 4 != 1
    mask = jnp.asarray(seen[None] & (np.arange(6) != 2)[:, None])
    arrays["key"][:, ~seen] = arrays["value"][:, ~seen] = np.nan

    def loss(arrays: Arrays) -> tuple[Array, Array]:
        out = FEW_BACKENDS[backend](**arrays, mask=mask, normalizer=eqxa.Entmax())
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(as_arrays(arrays))
    assert not np.asarray(out)[:, 2].any()
    assert np.isfinite(np.asarray(out)).all() and np.asarray(out)[:, 3].any()
    for x in grads.values():
        assert np.isfinite(np.asarray(x)).all()
    assert not np.asarray(grads["query"])[:, 2].any()
    assert not np.asarray(grads["key"])[:, ~seen].any()


def test_chunks_below_the_threshold_are_skipped() -> None:
    """A chunk that is computed would spread NaN: 0 times NaN is NaN."""
    arrays = qkv(batch=(), q_len=4, kv_len=16)
    arrays["value"][8:12] = np.nan
    bias = jnp.where((jnp.arange(16) >= 8) & (jnp.arange(16) < 12), -10.0, 0.0)
    attend = functools.partial(
        flash(4, 4), **as_arrays(arrays), bias=bias, normalizer=eqxa.Entmax(1.5)
    )
    assert np.isfinite(np.asarray(attend())).all()
    # With softmax, or in a chunk together with others, they have weights.
    assert np.isnan(np.asarray(attend(normalizer=eqxa.Softmax()))).all()
    assert np.isnan(np.asarray(attend(chunk_sizes=eqxa.ChunkSizes(4, 16)))).all()


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float64))
def test_dtypes(dtype: Any, x64: None) -> None:
    arrays = {name: jnp.asarray(x, dtype) for name, x in qkv().items()}
    wide = {name: x.astype(jnp.float64) for name, x in arrays.items()}
    expected = eqxa.standard_attention(**wide, normalizer=eqxa.Entmax(1.3))
    for attend in FEW_BACKENDS.values():
        found = attend(**arrays, normalizer=eqxa.Entmax(1.3))
        assert found.dtype == dtype
        close("output", found, expected, 2e-2 if dtype == jnp.bfloat16 else 1e-12)


def test_memory_grows_as_the_length() -> None:
    """Of the output and of the gradient."""

    def loss(arrays: Arrays, alpha: Array) -> Array:
        out = flash(512, 512)(**arrays, causal=True, normalizer=eqxa.Entmax(alpha))
        return jnp.sum(out**2)

    def size(length: int) -> int:
        spec = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        shapes = {name: spec for name in ("query", "key", "value")}
        function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        alpha = jax.ShapeDtypeStruct((1,), jnp.float32)
        memory = function.lower(shapes, alpha).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    short, long = size(4096), size(16384)
    assert long < 4.2 * short + 2**16
    assert long < 4 * 16384**2 / 8


@pytest.mark.parametrize(
    "row",
    (
        "`grad` of `vmap`",
        "`grad` of `jvp` of `scan` of `checkpoint`",
        "`jvp` of `grad` of `scan` of `checkpoint`",
        "`grad` of `shard_map`",
    ),
)
def test_composition(row: str) -> None:
    """Rows of the table of what composes with what, which hold all the others."""

    def result(attend: Callable[..., Array]) -> Any:
        def function(arrays: Arrays) -> Array:
            return attend(**arrays, causal=True, normalizer=eqxa.Entmax(1.4))

        return jax.tree.leaves(jax.jit(ROWS[row](function))(ARRAYS))

    expected = result(eqxa.standard_attention)
    for x, y in zip(result(flash(2, 3)), expected, strict=True):
        close(row, x, y, 1e-4)
        assert np.abs(np.asarray(y)).max() > 1e-3


def test_vmap_over_alpha() -> None:
    arrays = as_arrays(qkv())
    alphas = jnp.asarray([1.2, 2.0])

    def attend(alpha: Array) -> Array:
        return flash(4, 4)(**arrays, normalizer=eqxa.Entmax(alpha))

    found = jax.jit(jax.vmap(attend))(alphas)
    for i, alpha in enumerate((1.2, 2.0)):
        expected = eqxa.standard_attention(**arrays, normalizer=eqxa.Entmax(alpha))
        close("output", found[i], expected, 1e-5)


def test_module() -> None:
    """A fixed alpha stands in the config, one that is trained is given to the call."""
    arrays = as_arrays(qkv())
    fixed = eqxa.AttentionConfig(normalizer=eqxa.Entmax(1.3))
    assert hash(fixed) == hash(eqxa.AttentionConfig(normalizer=eqxa.Entmax(1.3)))
    expected = eqxa.standard_attention(**arrays, normalizer=eqxa.Entmax(1.3))
    close("standard", eqxa.Attention(fixed)(**arrays), expected)
    close("flash", eqxa.Attention(fixed, eqxa.Backend.FLASH)(**arrays), expected)

    def loss(normalizer: eqxa.Entmax) -> Array:
        return jnp.sum(eqxa.Attention()(**arrays, normalizer=normalizer))

    gradient = eqx.filter_grad(loss)(eqxa.Entmax(jnp.asarray(ALPHAS)))
    assert np.abs(np.asarray(gradient.alpha)).min() > 1e-3


def test_what_does_not_combine() -> None:
    arrays = as_arrays(qkv())
    entmax = eqxa.Entmax()
    with pytest.raises(ValueError, match="softmax_aux is given"):
        eqxa.flash_attention(**arrays, normalizer=entmax, softmax_aux=jnp.zeros(1))
    with pytest.raises(ValueError, match="softmax_aux is given"):
        eqxa.attention(**arrays, normalizer=entmax, softmax_aux=jnp.zeros(1))
    for attend in (eqxa.standard_attention, eqxa.flash_attention, eqxa.attention):
        with pytest.raises(ValueError, match="return_lse is given"):
            attend(**arrays, normalizer=entmax, return_lse=True)
    with pytest.raises(ValueError, match="normalize_output is given"):
        eqxa.flash_attention(**arrays, normalizer=entmax, normalize_output=False)
    with pytest.raises(ValueError, match="normalizer is given together with"):
        eqxa.attention(**arrays, normalizer=entmax, sequence_end=jnp.asarray([9, 9]))
    with pytest.raises(ValueError, match=r"alpha of shape \(3,\), but needs"):
        eqxa.flash_attention(**arrays, normalizer=eqxa.Entmax(jnp.ones(3)))


@pytest.mark.parametrize("alpha", (1.0, 2.1, float("nan"), np.zeros((2, 2))))
def test_alpha_out_of_range(alpha: Any) -> None:
    with pytest.raises(ValueError, match="Entmax has alpha"):
        eqxa.Entmax(alpha if isinstance(alpha, float) else jnp.asarray(alpha))


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="alpha"):
        eqxa.Entmax("1.5")  # pyright: ignore[reportArgumentType]  # is what is tested
    with pytest.raises(TypeError, match="normalizer has an array"):
        eqxa.AttentionConfig(normalizer=eqxa.Entmax(jnp.asarray(1.5)))
    with pytest.raises(TypeError, match="normalizer"):
        eqxa.AttentionConfig(normalizer="entmax")  # pyright: ignore[reportArgumentType]  # is what is tested
    with pytest.raises(TypeError, match="normalizer"):
        eqxa.flash_attention(**as_arrays(qkv()), normalizer="entmax")
