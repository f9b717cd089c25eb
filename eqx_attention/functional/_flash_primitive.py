"""Flash attention with derivatives in both modes, as two primitives of JAX.

The rule for forward mode has a part that is linear in the tangents. That part is a
primitive too, and the rule for its transpose is the backward pass; so reverse mode
costs what it costs with a rule of its own, and each mode is open to the other.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._jax import tree_map
from .._primitive import (
    array_type,
    batch_together,
    bind,
    create_primitive,
    is_unknown,
    no_transpose,
)
from ._block import attend_rows
from ._dropout import Dropout
from ._flash_core import pull_back
from ._flash_forward import forward
from ._flash_tangent import Tangent, tangent
from ._logits import LogitRules
from ._online_softmax import SoftmaxState
from ._problem import Operands, Problem
from ._tiles import TileSizes


def attend_both(
    operands: Operands, rules: LogitRules, dropout: Dropout | None, sizes: TileSizes
) -> SoftmaxState:
    """Attention that may be differentiated in either mode."""
    return SoftmaxState(*bind(_state, operands, rules, dropout, sizes))


def _state_of(
    operands: Operands, rules: LogitRules, dropout: Dropout | None, sizes: TileSizes
) -> tuple[Array, Array, Array]:
    """Numerator, maximum and denominator."""
    state = forward(Problem(operands, rules, dropout), sizes)
    return state.numerator, state.max_logits, state.denominator


def _state_types(operands: Any, *others: PyTree) -> tuple[Any, Any, Any]:
    numerator, denominator = _tangent_types(None, operands, *others)
    return numerator, denominator, denominator


def _state_jvp(primals: Any, tangents: Any) -> tuple[PyTree, PyTree]:
    operands, *others = primals
    state = bind(_state, *primals)
    direction = batch_together(tangents[0], *state)
    numerator, denominator = bind(_tangent, direction, operands, state[1], *others)
    return state, (numerator, None, denominator)


def _tangent_of(
    direction: Operands,
    operands: Operands,
    max_logits: Float[Array, "batch kv_heads group q_len"],
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
) -> tuple[Array, Array]:
    """Tangents of numerator and denominator: linear in `direction`, None where zero."""
    change = tangent(
        Problem(operands, rules, dropout),
        Tangent(direction.query, direction.key, direction.value, direction.parameters),
        max_logits,
        sizes,
    )
    return change.numerator, change.denominator


def _plain_tangent(
    direction: Operands, operands: Operands, rules: LogitRules, dropout: Dropout | None
) -> tuple[Array, Array]:
    """The same by JAX, to take derivatives of."""

    def state(operands: Operands) -> SoftmaxState:
        return attend_rows(Problem(operands, rules, dropout))

    value, change = eqx.filter_jvp(state, (operands,), (direction,))
    change = eqx.combine(change, tree_map(jnp.zeros_like, value))
    return change.numerator, change.denominator


def _tangent_types(direction: Any, operands: Any, *others: PyTree) -> tuple[Any, Any]:
    del direction, others
    query, value = operands.query, operands.value
    wide = any(x.dtype == jnp.float64 for x in (query, operands.key, value))
    rows, dtype = query.shape[:-1], jnp.float64 if wide else jnp.float32
    return (
        array_type(query, (*rows, value.shape[-1]), dtype),
        array_type(query, rows, dtype),
    )


def _tangent_jvp(primals: Any, tangents: Any) -> tuple[PyTree, PyTree]:
    direction, operands, max_logits, rules, dropout, _ = primals
    d_direction, d_operands, *_ = tangents
    out = bind(_tangent, *primals)
    changes: list[tuple[Array, Array]] = []
    if jax.tree.leaves(d_direction):
        d_direction = batch_together(d_direction, max_logits, *out)
        changes.append(bind(_tangent, d_direction, *primals[1:]))
    if jax.tree.leaves(d_operands):

        def of_operands(operands: Operands) -> tuple[Array, Array]:
            return _plain_tangent(direction, operands, rules, dropout)

        changes.append(eqx.filter_jvp(of_operands, (operands,), (d_operands,))[1])
    return out, jax.tree.map(lambda *parts: sum(parts), *changes)


def _tangent_transpose(inputs: Any, cotangents: Any) -> tuple[PyTree, ...]:
    direction, operands, max_logits, rules, dropout, sizes = inputs
    numerator, denominator = cotangents
    unknown = jax.tree.map(is_unknown, direction, is_leaf=is_unknown)
    gradient = pull_back(
        *(numerator, denominator, max_logits, unknown),
        *(operands, rules, dropout, sizes),
    )
    return _only(unknown, gradient), *(_nothing(x) for x in inputs[1:])


def _only(wanted: PyTree[bool], gradient: Operands) -> Operands:
    """What is wanted of a gradient: nothing for what a direction leaves as it is."""

    def keep(is_wanted: bool | None, x: Array | None) -> Array | None:
        return x if is_wanted else None

    return jax.tree.map(keep, wanted, gradient, is_leaf=lambda x: x is None)


def _nothing(tree: PyTree) -> PyTree:
    """The tree with None in place of each leaf."""

    def none(leaf: object) -> None:
        del leaf

    return jax.tree.map(none, tree)


_state = create_primitive(
    "flash_attention", _state_of, _state_types, _state_jvp, no_transpose
)
_tangent = create_primitive(
    "flash_attention_tangent",
    *(_tangent_of, _tangent_types, _tangent_jvp, _tangent_transpose),
)
