"""A kernel that can be differentiated once says so when it is asked for more."""

from collections.abc import Callable

import equinox as eqx
from equinox.internal import nondifferentiable
from jaxtyping import Array, PyTree


@eqx.filter_custom_vjp
def first_order(operands: PyTree, attend: Callable[[PyTree], Array]) -> Array:
    """`attend(operands)`, with its own gradient and no second derivative."""
    return attend(operands)


@first_order.def_fwd
def _(
    perturbed: PyTree, operands: PyTree, attend: Callable[[PyTree], Array]
) -> tuple[Array, PyTree]:
    del perturbed
    # A first derivative does not differentiate this rule; a second one does.
    operands = nondifferentiable(
        operands,
        msg="this backend has no second derivative: ask for Backend.FLASH or STANDARD",
    )
    return eqx.filter_vjp(attend, operands)


@first_order.def_bwd
def _(
    pull: Callable[[Array], tuple[PyTree]],
    d_out: Array,
    perturbed: PyTree,
    operands: PyTree,
    attend: Callable[[PyTree], Array],
) -> PyTree:
    del perturbed, operands, attend
    return pull(d_out)[0]
