"""Gradients of gradients, through every result, and against finite differences."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import BACKENDS, FEW_BACKENDS, Arrays, close, flash, normal, qkv

pytestmark = pytest.mark.numbers

SMALL: dict[str, Any] = {"batch": (), "q_len": 3, "kv_len": 5, "qk_dim": 2, "v_dim": 2}
OPTIONS: dict[str, Any] = {
    "causal": True,
    "alignment": eqxa.Alignment.BOTTOM_RIGHT,
    "sliding_window": (2, 0),
    "num_sink_tokens": 1,
    "logits_soft_cap": 1.5,
}


def trained(dtype: Any = np.float32, **shape: Any) -> Arrays:
    """An array for everything that has a gradient."""
    arrays = qkv(50, dtype=dtype, **(SMALL | shape))
    return arrays | {
        "bias": normal(53, 4, 1, arrays["key"].shape[-3], dtype=dtype),
        "softmax_aux": normal(54, 2, dtype=dtype),
        "sink_bias": normal(55, 4, 1, dtype=dtype),
        "softmax_scale": np.asarray(0.6, dtype),
    }


def scalar(attend: Callable[..., Any], **options: Any) -> Callable[[Arrays], Array]:
    """A function of everything that depends on output and lse, and not linearly."""

    def function(arrays: Arrays) -> Array:
        named = dict(arrays)
        query, key, value = (named.pop(n) for n in ("query", "key", "value"))
        output, lse = attend(query, key, value, return_lse=True, **named, **options)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(lse))

    return function


@pytest.mark.parametrize("backend", ("standard", "flash-2x3"))
def test_finite_differences(backend: str, x64: None) -> None:
    arrays = {n: jnp.asarray(x) for n, x in trained(np.float64).items()}
    function = jax.jit(scalar(BACKENDS[backend], **OPTIONS))
    check_grads(function, (arrays,), order=2, modes=["rev"], atol=1e-5, rtol=1e-5)


def second_order(kind: str, function: Callable[[Arrays], Array]) -> Callable[..., Any]:
    def directional(arrays: Arrays, direction: Arrays) -> Any:
        if kind == "forward over reverse":
            return jax.jvp(jax.grad(function), (arrays,), (direction,))[1]

        def slope(arrays: Arrays) -> Array:
            gradient = jax.grad(function)(arrays)
            return sum(jnp.vdot(gradient[n], direction[n]) for n in gradient)

        return jax.grad(slope)(arrays)

    return directional


@pytest.mark.parametrize("kind", ("reverse over reverse", "forward over reverse"))
def test_second_order_agrees(kind: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in trained(batch=(2,)).items()}
    direction = {
        n: jnp.asarray(normal(60 + i, *x.shape))
        for i, (n, x) in enumerate(arrays.items())
    }
    found = [
        jax.jit(second_order(kind, scalar(attend, **OPTIONS)))(arrays, direction)
        for attend in (eqxa.standard_attention, flash(2, 3))
    ]
    for name, expected in found[0].items():
        assert np.abs(np.asarray(expected)).max() > 0
        close(name, found[1][name], expected, 1e-4)


def test_second_order_through_dropout() -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv(70, batch=(2,)).items()}
    options = {"dropout_prob": 0.4, "dropout_key": jax.random.key(3)}
    found = [
        jax.jit(second_order("reverse over reverse", scalar(attend, **options)))(
            arrays, arrays
        )
        for attend in (eqxa.standard_attention, flash(4, 4))
    ]
    for name, expected in found[0].items():
        close(name, found[1][name], expected, 1e-4)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_forward_mode_is_right_or_refused(backend: str) -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv(71).items()}
    tangents = {n: jnp.asarray(normal(72, *x.shape)) for n, x in arrays.items()}
    function = scalar(BACKENDS[backend], causal=True)
    slope = sum(
        jnp.vdot(g, tangents[n]) for n, g in jax.jit(jax.grad(function))(arrays).items()
    )
    try:
        _, found = jax.jvp(function, (arrays,), (tangents,))
    except TypeError as error:
        assert backend != "standard", error
        return
    close("tangent", found, slope)


@pytest.mark.parametrize("name", ("bias", "softmax_aux", "sink_bias", "softmax_scale"))
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_one_gradient_alone(backend: str, name: str) -> None:
    """Each travels by itself too, when nothing else is differentiated."""
    arrays = {n: jnp.asarray(x) for n, x in trained().items()}
    function = scalar(BACKENDS[backend], **OPTIONS)
    expected = jax.jit(jax.grad(scalar(eqxa.standard_attention, **OPTIONS)))(arrays)[
        name
    ]
    found = jax.jit(jax.grad(lambda x: function(arrays | {name: x})))(arrays[name])
    close(name, found, expected)
    assert np.abs(np.asarray(found)).max() > 1e-3


def test_lse_alone() -> None:
    """Its gradient is there when the output is not used."""
    arrays = {n: jnp.asarray(x) for n, x in qkv(73).items()}

    def lse(attend: Callable[..., Any]) -> Callable[[Arrays], Array]:
        return lambda arrays: jnp.sum(attend(**arrays, return_lse=True)[1] ** 2)

    expected = jax.jit(jax.grad(lse(eqxa.standard_attention)))(arrays)
    found = jax.jit(jax.grad(lse(flash(4, 4))))(arrays)
    for name in arrays:
        close(name, found[name], expected[name])
    assert not np.asarray(found["value"]).any()


def test_integer_and_boolean_arguments_have_no_gradient() -> None:
    arrays = {n: jnp.asarray(x) for n, x in qkv(74).items()}
    mask = jnp.asarray(normal(75, 6, 9) > 0)

    def loss(mask: Array) -> Array:
        return jnp.sum(eqxa.flash_attention(**arrays, mask=mask))

    assert jax.grad(loss, allow_int=True)(mask).dtype == jax.dtypes.float0


def decode(query: Array, key: Array, value: Array) -> Array:
    end = jnp.full(query.shape[:1], key.shape[1])
    return eqxa.ragged_decode_attention(
        query, key, value, jnp.zeros_like(end), end, block_size=4
    )


@pytest.mark.parametrize("backend", ("flash-2x3", "decode"))
def test_second_derivatives_of_scanned_layers(backend: str) -> None:
    """A loop around the loop over chunks, in reverse of reverse."""
    given = {n: jnp.asarray(x) for n, x in qkv(v_dim=3).items()}

    def slope(attend: Callable[..., Array]) -> Array:
        def layers(query: Array) -> Array:
            def layer(x: Array, _: None) -> tuple[Array, None]:
                return attend(x, given["key"], given["value"]), None

            return jnp.sum(jnp.sin(jax.lax.scan(layer, query, None, length=2)[0]))

        def squared(query: Array) -> Array:
            return jnp.sum(jax.grad(layers)(query) ** 2)

        return jax.jit(jax.grad(squared))(given["query"])

    attend, options = {
        "decode": (decode, {"causal": True, "query_offset": 3}),
        "flash-2x3": (BACKENDS["flash-2x3"], {}),
    }[backend]
    expected = slope(functools.partial(eqxa.standard_attention, **options))
    close("second derivative", slope(attend), expected)
