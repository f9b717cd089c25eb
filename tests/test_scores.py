"""Scores: what each makes of the logits, alone and in a chain, with all gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa
from eqx_attention import scores
from eqx_attention.masks import Causal, SlidingWindow
from eqx_attention.scores import ALiBi, Bias, Distance, RelativeBias, Score, SoftCap

from .helpers import Arrays, Attend, close, flash, normal, qkv

LENGTH = 12
SLOPES = np.array([0.5, 0.25, 0.125, 0.3], np.float32)
TABLE = normal(30, 8, 4)
BIAS = normal(31, 2, 1, LENGTH, LENGTH)
BIAS[:, :, 3, 5:9] = -np.inf


class Linear(eqx.Module):
    """A score with fields: a number for each head, and one for each key."""

    slope: Array
    of_key: Array

    def __call__(
        self, logit: Array, batch: Array, head: Array, q: Array, kv: Array
    ) -> Array:
        of_key = self.of_key[kv % LENGTH]
        return logit * self.slope[head] + (batch + 1).astype(logit.dtype) * of_key


class Wave(eqx.Module):
    """A function of the distance with a field."""

    frequency: Array

    def __call__(self, distance: Array) -> Array:
        return jnp.sin(self.frequency * distance.astype(jnp.float32))


def t5_bucket(distance: Any, num_buckets: int, far: int, both: bool) -> Any:
    """Transcribed from T5's description: half exact, half logarithmic."""
    bucket = np.zeros_like(distance)
    if both:
        num_buckets //= 2
        bucket = np.where(distance > 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / np.log(far / exact)
    large = np.minimum(
        exact + (growth * (num_buckets - exact)).astype(int), num_buckets - 1
    )
    return bucket + np.where(distance < exact, distance, large)


# A score, and the same by `jax.nn`-like dense arrays: logits, and the four indices.
Dense = Callable[[Any, Any, Any, Any, Any, Any], Any]
SCORES: dict[str, tuple[scores.AbstractScore, Dense]] = {
    "soft cap": (
        SoftCap(jnp.float32(0.8)),
        lambda s, x, b, h, q, k: s.cap * jnp.tanh(x / s.cap),
    ),
    "alibi": (
        ALiBi(jnp.asarray(SLOPES)),
        lambda s, x, b, h, q, k: x - s.slopes[h] * np.abs(k - q).astype(np.float32),
    ),
    "relative": (
        RelativeBias(jnp.asarray(TABLE), max_distance=9),
        lambda s, x, b, h, q, k: x + s.table[t5_bucket(k - q, 8, 9, True), h],
    ),
    "relative, one side": (
        RelativeBias(jnp.asarray(TABLE), bidirectional=False, max_distance=9),
        lambda s, x, b, h, q, k: x + s.table[t5_bucket(k - q, 8, 9, False), h],
    ),
    "bias": (Bias(jnp.asarray(BIAS)), lambda s, x, b, h, q, k: x + s.array),
    "distance": (
        Distance(Wave(jnp.float32(0.7))),
        lambda s, x, b, h, q, k: (
            x + jnp.sin(s.fn.frequency * (k - q).astype(np.float32))
        ),
    ),
    "own": (
        Score(Linear(jnp.asarray(SLOPES), jnp.asarray(normal(32, LENGTH)))),
        lambda s, x, b, h, q, k: (
            x * s.fn.slope[h] + (b + 1).astype(np.float32) * s.fn.of_key[k]
        ),
    ),
    "chain": (
        SoftCap(jnp.float32(2.0))
        >> ALiBi(jnp.asarray(SLOPES))
        >> Bias(jnp.asarray(BIAS)),
        lambda s, x, b, h, q, k: (
            s.scores[0].scores[0].cap * jnp.tanh(x / s.scores[0].scores[0].cap)
            - s.scores[0].scores[1].slopes[h] * np.abs(k - q).astype(np.float32)
            + s.scores[1].array
        ),
    ),
}
SHAPE = (2, 4, LENGTH, LENGTH)


def dense(name: str) -> Attend:
    """Attention by plain arrays, differentiated by JAX."""
    indices = np.indices(SHAPE)

    def attend(query: Array, key: Array, value: Array, score: Any) -> Array:
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
        logits = SCORES[name][1](score, logits, *indices)
        logits = jnp.where(jnp.tri(LENGTH, dtype=bool)[None, None], logits, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)

    return attend


def found(attend: Attend, score: Any) -> tuple[Array, list[Array]]:
    """The output, and the gradients of all arrays."""
    arrays = {n: jnp.asarray(x) for n, x in qkv(q_len=LENGTH, kv_len=LENGTH).items()}
    direction = jnp.asarray(normal(33, 2, LENGTH, 4, 5))

    @eqx.filter_jit
    def run(arrays: Arrays, score: Any) -> Any:
        def loss(trained: Any) -> tuple[Array, Array]:
            arrays, score = trained
            output = attend(**arrays, score=score)
            return jnp.sum(output * direction), output

        (_, output), grads = eqx.filter_value_and_grad(loss, has_aux=True)(
            (arrays, score)
        )
        return output, jax.tree.leaves(grads)

    return run(arrays, score)


@pytest.mark.numbers
@pytest.mark.parametrize("backend", ("standard", "flash"))
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, backend: str) -> None:
    base = eqxa.standard_attention if backend == "standard" else flash(5, 4)

    def attend(query: Array, key: Array, value: Array, score: Any) -> Array:
        return base(query, key, value, bias=score, causal=True)

    output, grads = found(attend, SCORES[name][0])
    expected, expected_grads = found(dense(name), SCORES[name][0])
    close("output", output, expected)
    assert len(grads) == len(expected_grads) > 3
    for i, (gradient, right) in enumerate(zip(grads, expected_grads, strict=True)):
        close(f"gradient {i}", gradient, jnp.nan_to_num(right))


def test_alibi_slopes() -> None:
    """As in the paper: powers of 1/2 for 8 heads; for 12, those of 16 between them."""
    eight = 2.0 ** -np.arange(1, 9)
    np.testing.assert_allclose(ALiBi.of(8).slopes, eight)
    np.testing.assert_allclose(
        ALiBi.of(12).slopes, [*eight, *(2.0 ** -np.arange(0.5, 4.5, 1))], rtol=1e-6
    )


@pytest.mark.numbers
def test_flag_and_score_are_one() -> None:
    """The soft cap of the flag comes before the score."""
    given = {n: jnp.asarray(x) for n, x in qkv(q_len=LENGTH, kv_len=LENGTH).items()}
    alibi = ALiBi.of(4)
    by_flag = flash(4, 4)(**given, bias=alibi, logits_soft_cap=1.5)
    np.testing.assert_array_equal(
        by_flag, flash(4, 4)(**given, bias=SoftCap(1.5) >> alibi)
    )


@pytest.mark.numbers
def test_decode() -> None:
    """Positions are those of the cache's tokens."""
    arrays, start = qkv(q_len=LENGTH, kv_len=LENGTH), 1
    given = {n: jnp.asarray(x) for n, x in arrays.items()}
    cache = (
        jnp.pad(given[n], [(0, 0), (start, 3), (0, 0), (0, 0)])
        for n in ("key", "value")
    )
    score = ALiBi(jnp.asarray(SLOPES)) >> Score(
        Linear(jnp.ones(4), jnp.asarray(normal(32, LENGTH)))
    )
    out = eqxa.ragged_decode_attention(
        given["query"][:, -2:],
        *cache,
        *(jnp.full(2, n, jnp.int32) for n in (start, start + LENGTH)),
        bias=score,
        block_size=4,
    )
    whole = flash(4, 4)(**given, causal=True, bias=score)
    np.testing.assert_allclose(out, whole[:, -2:], rtol=1e-5, atol=1e-5)


@pytest.mark.numbers
def test_transforms() -> None:
    """Through vmap and scan as an argument; a second derivative; and with masks."""
    given: Arrays = {n: jnp.asarray(x)[0] for n, x in qkv(q_len=8, kv_len=8).items()}
    mask = Causal() & SlidingWindow(5, None)

    def attend(score: scores.AbstractScore) -> Array:
        return jnp.sum(flash(4, 4)(**given, bias=score, mask=mask) ** 2)

    slopes = jnp.stack([jnp.asarray(SLOPES), jnp.zeros(4)])
    expected = jnp.stack([attend(ALiBi(x)) for x in slopes])
    np.testing.assert_allclose(jax.vmap(attend)(ALiBi(slopes)), expected, rtol=1e-5)
    _, scanned = jax.lax.scan(lambda _, s: (None, attend(s)), None, ALiBi(slopes))
    np.testing.assert_allclose(scanned, expected, rtol=1e-5)

    def slope(size: Array) -> Array:
        return jax.grad(lambda size: attend(ALiBi(size * slopes[0])))(size)

    step, at = 1e-2, jnp.float32(1.0)
    second = jax.grad(slope)(at)
    numerical = (slope(at + step) - slope(at - step)) / (2 * step)
    np.testing.assert_allclose(second, numerical, rtol=2e-2)


@pytest.mark.parametrize(
    ("score", "formula"),
    (
        (SoftCap(30.0) >> SoftCap(2.0), "SoftCap(cap=30.0) >> SoftCap(cap=2.0)"),
        (Distance(Wave(jnp.float32(1))), "Distance(Wave(frequency=f32[]))"),
    ),
)
def test_repr(score: scores.AbstractScore, formula: str) -> None:
    assert formula in repr(score)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "slopes": (lambda: ALiBi(jnp.ones(3)), ValueError, "ALiBi.slopes has an axis"),
    "table": (lambda: RelativeBias(jnp.ones((8, 3))), ValueError, "RelativeBias.table"),
    "table's axes": (lambda: RelativeBias(jnp.ones(8)), ValueError, "num_buckets, q_h"),
    "buckets": (lambda: RelativeBias(jnp.ones((2, 4))), ValueError, "at least 4 buck"),
    "cap": (lambda: SoftCap(0.0), ValueError, "must be positive"),
    "cap's axes": (lambda: SoftCap(jnp.ones(2)), ValueError, "a single number"),
    "bias": (lambda: Bias(jnp.ones((3, 3))), ValueError, "bias has shape"),
    "bools": (
        lambda: Score(lambda x, b, h, q, k: x > 0),
        TypeError,
        "Score.fn returned bool",
    ),
    "shape": (
        lambda: Score(lambda x, b, h, q, k: jnp.sum(x)),
        ValueError,
        "Score.fn returned shape",
    ),
    "distance's shape": (
        lambda: Distance(lambda x: jnp.ones(3)),
        ValueError,
        "Distance.fn returned shape",
    ),
    "heads": (lambda: ALiBi.of(0), ValueError, "num_heads is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    make, error, message = WRONG[name]
    given: Arrays = {n: jnp.asarray(x) for n, x in qkv(q_len=12, kv_len=12).items()}
    with pytest.raises(error, match=message):
        flash(4, 4)(**given, bias=make())
