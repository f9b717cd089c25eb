"""Results over a part of the keys, and how they are joined."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import (
    Arrays,
    Attend,
    agree,
    call,
    close,
    normal,
    qkv,
    want,
)
from .reference import merge

pytestmark = pytest.mark.numbers

CUTS = (0, 3, 3, 7, 9)


def in_parts(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """Attention over four parts of the keys, one of them empty; the first has sinks."""
    bias, sinks = options.pop("bias"), options.pop("softmax_aux", None)
    options.pop("return_lse")
    whole = None
    for start, end in itertools.pairwise(CUTS):
        part = eqxa.flash_attention(
            query,
            key[:, start:end],
            value[:, start:end],
            bias=bias[..., start:end],
            softmax_aux=sinks if start == 0 and end > 0 else None,
            normalize_output=False,
            chunk_sizes=eqxa.ChunkSizes(4, 4),
            **options,
        )
        assert isinstance(part, eqxa.PartialAttention)
        whole = part if whole is None else whole.merge(part)
    return whole.finish()


def merged(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """The same of normalised results."""
    bias, sinks = options.pop("bias"), options.pop("softmax_aux", None)
    parts = [
        eqxa.standard_attention(
            query,
            key[:, start:end],
            value[:, start:end],
            bias=bias[..., start:end],
            softmax_aux=sinks if start == 0 and end > 0 else None,
            **options,
        )
        for start, end in itertools.pairwise(CUTS)
    ]
    return eqxa.merge_attention([p[0] for p in parts], [p[1] for p in parts])


@pytest.mark.parametrize("attend", (in_parts, merged))
@pytest.mark.parametrize("sinks", (False, True), ids=("", "sinks"))
def test_parts_are_the_whole(attend: Attend, sinks: bool) -> None:
    """Values and every gradient, with rows that one part or no part sees."""
    bias = normal(3, 2, 4, 6, 9)
    bias[0, :, 2, :7] = bias[1, :, 3] = -np.inf
    arrays = qkv() | {"bias": bias}
    if sinks:
        arrays["softmax_aux"] = normal(4, 4, 2)
    found = call(attend, arrays, logits_soft_cap=2.0)
    agree(found, want(arrays, logits_soft_cap=2.0))


def test_the_pieces() -> None:
    """They are the sums that are relative to `max_logits`, the numerator's too."""
    arrays = qkv() | {"mask": normal(3, 6, 9) > 0}
    arrays["mask"][2] = False
    part = eqxa.flash_attention(
        **{n: jnp.asarray(x) for n, x in arrays.items()}, normalize_output=False
    )
    assert part.numerator.shape == (2, 6, 4, 5)
    assert part.max_logits.shape == part.denominator.shape == (2, 4, 6)
    expected = want(arrays)
    empty = np.isneginf(expected.lse)
    np.testing.assert_array_equal(np.asarray(part.denominator) == 0, empty)
    np.testing.assert_array_equal(np.asarray(part.numerator)[:, 2], 0)
    np.testing.assert_array_equal(np.isneginf(part.max_logits), empty)
    total = np.where(
        empty, 0, np.exp(expected.lse - np.where(empty, 0, part.max_logits))
    )
    close("denominator", part.denominator, total)
    close(
        "numerator",
        part.numerator,
        expected.output * np.swapaxes(total, 1, 2)[..., None],
    )
    output, lse = part.finish()
    close("output", output, expected.output)
    close("lse", lse, expected.lse)


def test_gradient_through_the_pieces() -> None:
    """All that does not depend on the maximum itself has its gradient."""
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}

    def by_pieces(arrays: Arrays) -> Array:
        part = eqxa.flash_attention(**arrays, causal=True, normalize_output=False)
        share = jnp.swapaxes(part.denominator, -1, -2)[..., None]
        return jnp.sum(jnp.sin(part.numerator / share)) + jnp.sum(
            part.max_logits + jnp.log(part.denominator)
        )

    def by_results(arrays: Arrays) -> Array:
        output, lse = eqxa.standard_attention(**arrays, causal=True, return_lse=True)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse)

    found = jax.jit(jax.grad(by_pieces))(arrays)
    expected = jax.jit(jax.grad(by_results))(arrays)
    for name in arrays:
        close(name, found[name], expected[name])


def test_merging_in_any_order() -> None:
    arrays = qkv(kv_len=12)
    parts = [
        eqxa.flash_attention(
            jnp.asarray(arrays["query"]),
            jnp.asarray(arrays["key"][:, i : i + 4]),
            jnp.asarray(arrays["value"][:, i : i + 4]),
            normalize_output=False,
        )
        for i in (0, 4, 8)
    ]
    a, b, c = parts
    expected = want(arrays)
    for whole in (a.merge(b).merge(c), c.merge(a.merge(b)), b.merge(c).merge(a)):
        output, lse = whole.finish()
        close("output", output, expected.output)
        close("lse", lse, expected.lse)


def test_merge_attention_far_apart() -> None:
    """Large scores do not overflow, and nothing with nothing stays nothing."""
    outputs = [normal(i, 3, 2, 4) for i in range(3)]
    lses = [
        np.array([[1e3, 5.0, -np.inf], [-1e4, 0.0, 300.0]], np.float32),
        np.array([[1e3 + 1, -np.inf, -np.inf], [-1e4, -900.0, 300.0]], np.float32),
        np.array([[-1e3, 5.0, -np.inf], [-np.inf, 900.0, 300.0]], np.float32),
    ]
    for output, lse in zip(outputs, lses, strict=True):
        output[np.isneginf(lse).T] = 0
    output, lse = eqxa.merge_attention(
        [jnp.asarray(x) for x in outputs], [jnp.asarray(x) for x in lses]
    )
    expected_output, expected_lse = merge(outputs, lses)
    close("output", output, expected_output)
    close("lse", lse, expected_lse, 1e-6)
    assert not np.asarray(output)[2, 0].any()


def test_merge_attention_gradient_of_nothing() -> None:
    """No NaN comes from rows that are empty in one part, or in all."""
    outputs = [jnp.zeros((2, 1, 3)), jnp.zeros((2, 1, 3))]
    lses = [jnp.array([[-jnp.inf, 1.0]]), jnp.array([[-jnp.inf, -jnp.inf]])]

    def loss(outputs: list[Array], lses: list[Array]) -> Array:
        output, lse = eqxa.merge_attention(outputs, lses)
        return jnp.sum(output) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

    for x in jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(outputs, lses)):
        assert np.isfinite(np.asarray(x)).all()


def test_merge_of_one() -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv().items()}
    output, lse = eqxa.standard_attention(**arrays, return_lse=True)
    joined, joined_lse = eqxa.merge_attention([output], [lse])
    np.testing.assert_allclose(joined, output, rtol=1e-6)
    np.testing.assert_allclose(joined_lse, lse, rtol=1e-6)


def test_merge_keeps_the_dtype() -> None:
    outputs = [jnp.ones((3, 2, 4), jnp.bfloat16)] * 2
    lses = [jnp.zeros((2, 3))] * 2
    output, lse = eqxa.merge_attention(outputs, lses)
    assert output.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, np.full((2, 3), np.log(2)), rtol=1e-6)
