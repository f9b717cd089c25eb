"""Attention inside the solvers of optimistix, diffrax and lineax."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import close, normal

pytestmark = pytest.mark.numbers

LENGTH, HEADS, DIM = 5, 2, 2
X = jnp.asarray(normal(0, LENGTH, HEADS, DIM))
ATTEND = {
    "standard": eqxa.standard_attention,
    "flash": eqx.Partial(
        eqxa.flash_attention,
        chunk_sizes=eqxa.ChunkSizes(2, 3),
        differentiation=eqxa.Differentiation.BOTH,
    ),
}


class Layer(eqx.Module):
    """Attention of tokens to themselves, with weights to be trained. It contracts."""

    attend: Callable[..., Array] = eqx.field(static=True)
    mix: Array

    def __init__(self, attend: Callable[..., Array]) -> None:
        self.attend = attend
        self.mix = jnp.asarray(normal(1, DIM, DIM, std=0.3))

    def __call__(self, x: Array) -> Array:
        return 0.5 * self.attend(x @ self.mix, x, x, causal=True)


def agree(run: Callable[[Layer], Any], tolerance: float = 1e-4) -> Any:
    """Asserts that flash attention finds what standard attention finds."""
    found, expected = (
        eqx.filter_jit(run)(Layer(ATTEND[name])) for name in ("flash", "standard")
    )
    leaves = jax.tree.leaves(eqx.filter(found, eqx.is_array))
    others = jax.tree.leaves(eqx.filter(expected, eqx.is_array))
    assert leaves
    for x, y in zip(leaves, others, strict=True):
        close("result", x, y, tolerance)
        assert np.abs(np.asarray(x)).max() > 1e-3
    return found


def value_and_grad(loss: Callable[[Layer], Array]) -> Callable[[Layer], Any]:
    return eqx.filter_value_and_grad(loss)


def test_fixed_point() -> None:
    """With its implicit adjoint, which transposes the linearised layer."""

    def loss(layer: Layer) -> Array:
        solver = optx.FixedPointIteration(rtol=1e-6, atol=1e-6)
        found = optx.fixed_point(lambda x, _: X + layer(x), solver, X, max_steps=100)
        return jnp.sum(jnp.sin(found.value))

    agree(value_and_grad(loss))


def test_root_find() -> None:
    """By Newton steps, each with the Jacobian of attention."""

    def root(layer: Layer) -> Array:
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        return optx.root_find(lambda x, _: x - X - layer(x), solver, X).value

    def loss(layer: Layer) -> Array:
        return jnp.sum(jnp.sin(root(layer)))

    agree(value_and_grad(loss))
    layer = Layer(ATTEND["flash"])
    found = eqx.filter_jit(root)(layer)
    close("root", found, X + layer(found), 1e-5)


def test_least_squares() -> None:
    """Recovers the weights that made the targets, by Gauss and Newton."""

    def fit(layer: Layer) -> Array:
        targets = layer(X)

        def residuals(mix: Array, _: None) -> Array:
            return eqx.tree_at(lambda layer: layer.mix, layer, mix)(X) - targets

        solver = optx.LevenbergMarquardt(rtol=1e-6, atol=1e-6)
        start = layer.mix + 0.1
        return optx.least_squares(residuals, solver, start, max_steps=100).value

    close("weights", agree(fit, 1e-2), Layer(ATTEND["flash"]).mix, 1e-2)


def test_minimise() -> None:
    def loss(layer: Layer) -> Array:
        def energy(x: Array, _: None) -> Array:
            return jnp.sum((x - X - layer(x)) ** 2)

        solver = optx.BFGS(rtol=1e-5, atol=1e-6)
        return optx.minimise(energy, solver, X, max_steps=200).value

    agree(loss, 1e-2)


def test_differential_equation() -> None:
    """Tokens that move along attention, differentiated in forward mode."""

    def end(layer: Layer, scale: Array) -> Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, x, args: scale * layer(x) - x),
            diffrax.Heun(),
            *(0.0, 1.0, 0.25),
            X,
            adjoint=diffrax.ForwardMode(),
        )
        assert solution.ys is not None
        return solution.ys

    agree(lambda layer: jax.jacfwd(lambda scale: end(layer, scale))(jnp.asarray(1.0)))


def test_linear_operator() -> None:
    """The Jacobian as an operator: solved by iteration, transposed, materialised."""

    def run(layer: Layer) -> Any:
        operator = lx.JacobianLinearOperator(lambda x, _: x - layer(x), X)
        linear = lx.linearise(operator)
        solver = lx.GMRES(rtol=1e-5, atol=1e-5)
        solution = lx.linear_solve(linear, X, solver).value
        return solution, linear.T.mv(X), operator.as_matrix()

    solution, transposed, matrix = agree(run, 1e-3)
    found = matrix @ solution.reshape(-1)
    close("solution", found, X.reshape(-1), 1e-3)
    close("transpose", transposed.reshape(-1), matrix.T @ X.reshape(-1))
