"""Flash attention as one function with derivatives of its own.

In reverse mode the derivative is the chunked backward pass. Derivatives of that, and
forward-mode derivatives on the way to them, are those of `attend_rows`, by JAX.
"""

from collections.abc import Callable
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._config import ChunkSizes
from .._jax import vary_together, vjp
from ._block import attend_block, attend_rows, whole
from ._derivative import derivatives_of
from ._dropout import Dropout
from ._flash_backward import Wanted, backward
from ._flash_forward import forward
from ._logits import LogitRules
from ._online_softmax import SoftmaxState
from ._problem import Operands, Problem
from ._tiles import TileSizes

Attend: TypeAlias = Callable[
    [Operands, LogitRules, Dropout | None, TileSizes], SoftmaxState
]


def flash_state(
    problem: Problem, chunk_sizes: ChunkSizes, attend: Attend
) -> SoftmaxState:
    """The state of every query after all keys, with the derivatives of `attend`."""
    if problem.is_empty:
        return attend_block(problem, whole(problem))[0]
    sizes = problem.tile_sizes(chunk_sizes)
    problem = vary_together(problem)
    state = attend(problem.operands, problem.rules, problem.dropout, sizes)
    return SoftmaxState(
        state.numerator, jax.lax.stop_gradient(state.max_logits), state.denominator
    )


@eqx.filter_custom_vjp
def attend_reverse(
    operands: Operands, rules: LogitRules, dropout: Dropout | None, sizes: TileSizes
) -> SoftmaxState:
    """Attention that is to be differentiated in reverse mode first."""
    return _forward(operands, rules=rules, dropout=dropout, sizes=sizes)


@attend_reverse.def_fwd
def _attend_fwd(
    perturbed: PyTree[bool],
    operands: Operands,
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
) -> tuple[SoftmaxState, Float[Array, "..."]]:
    del perturbed
    state = _forward(operands, rules=rules, dropout=dropout, sizes=sizes)
    return state, state.max_logits


@attend_reverse.def_bwd
def _attend_bwd(
    max_logits: Float[Array, "..."],
    cotangent: PyTree,
    perturbed: PyTree[bool],
    operands: Operands,
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
) -> Operands:
    return pull_back(
        *(cotangent.numerator, cotangent.denominator, max_logits, perturbed),
        *(operands, rules, dropout, sizes),
    )


def pull_back(
    numerator: Float[Array, "..."] | None,
    denominator: Float[Array, "..."] | None,
    max_logits: Float[Array, "..."],
    perturbed: PyTree[bool],
    operands: Operands,
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
) -> Operands:
    """The gradient of the operands, from cotangents of the state; None is zero."""
    wanted: Wanted = jax.tree.map(
        bool, perturbed.parameters, is_leaf=lambda x: x is None
    )
    if numerator is None:
        shape = (*max_logits.shape, operands.value.shape[-1])
        numerator = jnp.zeros(shape, max_logits.dtype)
    if denominator is None:
        denominator = jnp.zeros_like(max_logits)
    cotangent = SoftmaxState(numerator, max_logits, denominator)
    return _backward(
        operands, cotangent, rules=rules, dropout=dropout, sizes=sizes, wanted=wanted
    )


def _plain_forward(
    operands: Operands, *, rules: LogitRules, dropout: Dropout | None, sizes: TileSizes
) -> SoftmaxState:
    del sizes
    return attend_rows(Problem(operands, rules, dropout))


@derivatives_of(_plain_forward)
def _forward(
    operands: Operands, *, rules: LogitRules, dropout: Dropout | None, sizes: TileSizes
) -> SoftmaxState:
    return forward(Problem(operands, rules, dropout), sizes)


def _plain_backward(
    operands: Operands,
    cotangent: SoftmaxState,
    *,
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
    wanted: Wanted,
) -> Operands:
    del sizes
    parameters = eqx.filter(operands.parameters, wanted)
    free = Operands(operands.query, operands.key, operands.value, parameters)

    def state(free: Operands) -> SoftmaxState:
        return attend_rows(Problem(eqx.combine(free, operands), rules, dropout))

    (gradient,) = vjp(state, free)[1](cotangent)
    return gradient


@derivatives_of(_plain_backward)
def _backward(
    operands: Operands,
    cotangent: SoftmaxState,
    *,
    rules: LogitRules,
    dropout: Dropout | None,
    sizes: TileSizes,
    wanted: Wanted,
) -> Operands:
    return backward(Problem(operands, rules, dropout), sizes, wanted, cotangent)
