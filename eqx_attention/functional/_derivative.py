"""Derivatives that are those of another function."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

_Out = TypeVar("_Out")


def derivatives_of(
    plain: Callable[..., _Out],
) -> Callable[[Callable[..., _Out]], Callable[..., _Out]]:
    """Gives a function the derivatives of `plain`, of any order and in either mode.

    Both compute the same, from positional arguments that are differentiated and named
    ones that are not. The rule for forward mode serves for reverse mode as well, but
    within a loop JAX 0.10 forgets it on the way to a second derivative in reverse: so
    beneath it is one for reverse mode.
    """

    def decorate(function: Callable[..., _Out]) -> Callable[..., _Out]:
        @eqx.filter_custom_vjp
        def reversible(primals: tuple[PyTree, ...], named: dict[str, PyTree]) -> _Out:
            return function(*primals, **named)

        @reversible.def_fwd
        def _(
            perturbed: PyTree, primals: tuple[PyTree, ...], named: dict[str, PyTree]
        ) -> tuple[_Out, None]:
            del perturbed
            return reversible(primals, named), None

        @reversible.def_bwd
        def _(
            residuals: None,
            cotangent: PyTree,
            perturbed: PyTree,
            primals: tuple[PyTree, ...],
            named: dict[str, PyTree],
        ) -> tuple[PyTree, ...]:
            del residuals, perturbed
            out, pull = eqx.filter_vjp(lambda p: plain(*p, **named), primals)
            return pull(_filled(cotangent, out))[0]

        @eqx.filter_custom_jvp
        def differentiable(*primals: PyTree, **named: PyTree) -> _Out:
            return reversible(primals, named)

        @differentiable.def_jvp
        def _(
            primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...], **named: PyTree
        ) -> tuple[_Out, PyTree]:
            out = differentiable(*primals, **named)
            tangent = eqx.filter_jvp(lambda *p: plain(*p, **named), primals, tangents)[
                1
            ]
            return out, tangent

        return differentiable

    return decorate


def _filled(cotangent: PyTree, out: PyTree) -> PyTree:
    """The cotangent of `out`, with zeros where it is None."""

    def fill(d: Array | None, x: Array) -> Array:
        return jnp.zeros_like(x) if d is None else d

    return jax.tree.map(fill, cotangent, out, is_leaf=lambda d: d is None)
