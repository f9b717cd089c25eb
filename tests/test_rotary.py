"""Rotary embeddings against complex numbers, and their scaling against known ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers


def turned(
    x: np.ndarray, positions: np.ndarray, dim: int, theta: float, interleaved: bool
) -> np.ndarray:
    """Pairs as complex numbers: a turn is a product."""
    x = x.astype(np.float64)
    frequencies = theta ** (-np.arange(0, dim, 2) / dim)
    turns = np.exp(1j * positions[..., None] * frequencies)[..., None, :]
    real, imaginary = (
        (x[..., :dim:2], x[..., 1:dim:2])
        if interleaved
        else (x[..., : dim // 2], x[..., dim // 2 : dim])
    )
    pairs = (real + 1j * imaginary) * turns
    out = x.copy()
    if interleaved:
        out[..., :dim:2], out[..., 1:dim:2] = pairs.real, pairs.imag
    else:
        out[..., : dim // 2], out[..., dim // 2 : dim] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("dim", (2, 6, 8))
def test_turns(dim: int, interleaved: bool) -> None:
    x = normal(0, 2, 5, 3, 8)
    rotary = eqxa.RotaryEmbedding(dim, theta=100.0, interleaved=interleaved)
    rows = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 0]])
    cases = (None, np.arange(5)), (rows[0], rows[0]), (rows[:1], rows[:1]), (rows, rows)
    for given, positions in cases:
        found = rotary(jnp.asarray(x), None if given is None else jnp.asarray(given))
        close("heads", found, turned(x, positions, dim, 100.0, interleaved))


def test_only_distance_matters() -> None:
    rotary = eqxa.RotaryEmbedding(8)
    query, key = jnp.asarray(normal(0, 1, 1, 8)), jnp.asarray(normal(1, 1, 1, 8))

    def product(i: int, j: int) -> Any:
        a, b = (rotary(x, jnp.array([p])) for x, p in ((query, i), (key, j)))
        return jnp.sum(a * b)

    close("product", product(1007, 1002), product(5, 0), 1e-4)


# The transformers library (5.25) gave these for the same parameters, in float32; of the
# longer ones each eighth stands here.
SCALED: dict[str, tuple[eqxa.RotaryEmbedding, list[float], float]] = {
    "linear": (
        eqxa.RotaryEmbedding(16, scaling=eqxa.LinearScaling(4.0)),
        [0.25, 0.0790569, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.0,
    ),
    # Dynamic with a factor of 2, at 8192 tokens in place of 2048.
    "ntk": (
        eqxa.RotaryEmbedding(16, scaling=eqxa.NTKScaling(2 * 8192 / 2048 - 2 + 1)),
        [
            *(1.0, 0.239481, 0.0573513, 0.0137346),
            *(0.00328917, 0.000787696, 0.000188638, 4.51754e-05),
        ],
        1.0,
    ),
    "yarn": (
        eqxa.RotaryEmbedding(64, scaling=eqxa.YaRNScaling(4.0, 2048)),
        [1.0, 0.1, 0.00538462, 0.00025],
        1.138629436111989,
    ),
    "yarn with all options": (
        eqxa.RotaryEmbedding(
            16,
            theta=1e6,
            scaling=eqxa.YaRNScaling(
                *(32.0, 4096),
                beta_fast=16,
                beta_slow=2,
                attention_factor=0.7,
                truncate=False,
            ),
        ),
        [
            *(1.0, 0.177828, 0.0316228, 0.00176312),
            *(3.125e-05, 5.55712e-06, 9.88212e-07, 1.75732e-07),
        ],
        0.7,
    ),
    "llama 3.1": (
        eqxa.RotaryEmbedding(128, theta=5e5, scaling=eqxa.Llama3Scaling()),
        [
            *(1.0, 0.193923, 0.037606, 0.00729267),
            *(0.000524846, 3.4281e-05, 6.64787e-06, 1.28917e-06),
        ],
        1.0,
    ),
    "llama 3.2": (
        eqxa.RotaryEmbedding(16, theta=5e5, scaling=eqxa.Llama3Scaling(32.0)),
        [
            *(1.0, 0.193923, 0.037606, 0.00729267),
            *(0.000429557, 8.57026e-06, 1.66197e-06, 3.22293e-07),
        ],
        1.0,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaling(name: str) -> None:
    rotary, expected, magnitude = SCALED[name]
    frequencies, factor = rotary.frequencies()
    frequencies = frequencies[:: len(frequencies) // len(expected)]
    np.testing.assert_allclose(frequencies, expected, rtol=2e-5)
    np.testing.assert_allclose(factor, magnitude, rtol=1e-6)
    # One token at position 1, whose pairs are (1, 0): cosine and sine themselves.
    half = rotary.dim // 2
    x = jnp.concatenate((jnp.ones(half), jnp.zeros(half)))[None, None]
    found = rotary(x, jnp.array([1]))[0, 0]
    full, _ = rotary.frequencies()
    waves = magnitude * np.concatenate((np.cos(full), np.sin(full)))
    close("cosine and sine", found, waves)


def test_dtypes() -> None:
    """What is narrow is turned in float32; what is wide, in float64."""
    x, positions = normal(0, 2, 1, 4), jnp.array([10_000, 20_001])
    rotary = eqxa.RotaryEmbedding(4, theta=50.0)
    narrow = rotary(jnp.asarray(x, jnp.bfloat16), positions)
    assert narrow.dtype == jnp.bfloat16
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    expected = turned(rounded, np.asarray(positions), 4, 50.0, False)
    close("bfloat16", narrow.astype(jnp.float32), expected, 2**-8)
    with jax.enable_x64(True):
        wide = rotary(jnp.asarray(x, jnp.float64), jnp.asarray(positions, jnp.int64))
        assert wide.dtype == jnp.float64
        close("float64", wide, turned(x, np.asarray(positions), 4, 50.0, False), 1e-11)


WRONG: dict[str, tuple[Any, str]] = {
    "odd": (lambda: eqxa.RotaryEmbedding(7), "dim is 7, but .* even"),
    "no dim": (lambda: eqxa.RotaryEmbedding(0), "dim is 0, but"),
    "no int": (lambda: eqxa.RotaryEmbedding(8.0), "dim"),
    "theta": (lambda: eqxa.RotaryEmbedding(8, theta=1.0), "theta is 1.0, but"),
    "factor": (lambda: eqxa.LinearScaling(0.0), "factor is 0.0, but must be pos"),
    "length": (lambda: eqxa.YaRNScaling(2.0, 10.5), "original_length"),
    "ramp": (lambda: eqxa.YaRNScaling(2.0, 10, 1.0, 1.0), "beta_fast is 1.0, but"),
    "mean": (
        lambda: eqxa.Llama3Scaling(high_frequency_factor=1.0),
        "high_frequency_factor is 1.0, but must be above",
    ),
    "two dimensions": (
        lambda: eqxa.RotaryEmbedding(2, scaling=eqxa.NTKScaling(2.0)),
        "dim is 2, but NTKScaling needs at least 4",
    ),
    "narrow heads": (
        lambda: eqxa.RotaryEmbedding(8)(jnp.zeros((3, 2, 6))),
        "x has heads of width 6, but dim is 8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
