"""What composes with what: each row of the table in `docs/differentiation.md`."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

import eqx_attention as eqxa

from .helpers import Arrays, close, flash, normal, qkv

pytestmark = pytest.mark.numbers

Function = Callable[[Arrays], Array]

PAGE = Path(__file__).parent.parent / "docs" / "differentiation.md"
ARRAYS: Arrays = {
    name: jnp.asarray(x)
    for name, x in qkv(
        30, batch=(), q_len=4, kv_len=4, q_heads=2, kv_heads=1, qk_dim=2, v_dim=2
    ).items()
}
DIRECTION: Arrays = {
    name: jnp.asarray(normal(40 + i, *x.shape))
    for i, (name, x) in enumerate(ARRAYS.items())
}
BOTH = eqxa.Differentiation.BOTH
COLUMNS: dict[str, Callable[..., Array]] = {
    "standard": eqxa.standard_attention,
    "`REVERSE`": flash(2, 3),
    "`BOTH`": functools.partial(flash(2, 3), differentiation=BOTH),
}


def loss(function: Function) -> Function:
    return lambda arrays: jnp.sum(jnp.sin(function(arrays)))


def jvp(function: Function) -> Function:
    return lambda arrays: jax.jvp(function, (arrays,), (DIRECTION,))[1]


def slope(function: Function) -> Function:
    """The gradient along a direction."""

    def along(arrays: Arrays) -> Array:
        gradient = jax.grad(function)(arrays)
        return sum(jnp.vdot(gradient[n], DIRECTION[n]) for n in DIRECTION)

    return along


def linearize(function: Function) -> Callable[[Arrays], Any]:
    return lambda arrays: jax.linearize(function, arrays)[1](DIRECTION)


def over_batch(function: Function) -> Function:
    """Over queries of several kinds, each of which meets the same keys."""

    def mapped(arrays: Arrays) -> Array:
        def one(shift: Array) -> Array:
            return function(arrays | {"query": arrays["query"] + shift})

        return jax.vmap(one)(jnp.asarray([0.0, 1.0, 2.0]))

    return mapped


def layers(function: Function) -> Function:
    """A loop over layers that are computed again in reverse."""

    def scanned(arrays: Arrays) -> Array:
        @jax.checkpoint
        def layer(x: Array, _: None) -> tuple[Array, None]:
            return x + function(arrays | {"query": x}), None

        return jax.lax.scan(layer, arrays["query"], None, length=2)[0]

    return scanned


def sharded(function: Function) -> Function:
    """Queries on two devices, each of which has all keys."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split, whole = PartitionSpec("x"), PartitionSpec()
    specs = {"query": split, "key": whole, "value": whole}
    return jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=split)


ROWS: dict[str, Callable[[Function], Callable[[Arrays], Any]]] = {
    "`vmap`": over_batch,
    "`jvp`": jvp,
    "`grad`": lambda f: jax.grad(loss(f)),
    "`linearize`": linearize,
    "`jacfwd`": jax.jacfwd,
    "`jacrev`": jax.jacrev,
    "`hessian`": lambda f: jax.hessian(loss(f)),
    "`jvp` of `grad`": lambda f: jvp(jax.grad(loss(f))),
    "`grad` of `grad`": lambda f: jax.grad(slope(loss(f))),
    "`grad` of `jvp`": lambda f: jax.grad(jvp(loss(f))),
    "`jvp` of `jvp`": lambda f: jvp(jvp(f)),
    "`vmap` of `jvp`": lambda f: over_batch(jvp(f)),
    "`jvp` of `vmap`": lambda f: jvp(over_batch(f)),
    "`vmap` of `grad`": lambda f: over_batch(slope(loss(f))),
    "`grad` of `vmap`": lambda f: jax.grad(loss(over_batch(f))),
    "`jvp` of `scan` of `checkpoint`": lambda f: jvp(layers(f)),
    "`grad` of `scan` of `checkpoint`": lambda f: jax.grad(loss(layers(f))),
    "`jvp` of `grad` of `scan` of `checkpoint`": (
        lambda f: jvp(jax.grad(loss(layers(f))))
    ),
    "`grad` of `jvp` of `scan` of `checkpoint`": (
        lambda f: jax.grad(jvp(loss(layers(f))))
    ),
    "`jvp` of `shard_map`": lambda f: jvp(sharded(f)),
    "`grad` of `shard_map`": lambda f: jax.grad(loss(sharded(f))),
}


def table() -> dict[str, dict[str, bool]]:
    """The page's: whether a row's transformation works with a column's attention."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", PAGE.read_text(), re.MULTILINE)
    ]
    head, _, *rows = lines
    newest = jax.__version_info__ >= (0, 12)
    yes = {"yes": True, "no": False, "JAX 0.12": newest}
    return {
        name: dict(zip(head[1:], (yes[cell] for cell in cells), strict=True))
        for name, *cells in rows
    }


TABLE = table()


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(ROWS)
    assert all(list(row) == list(COLUMNS) for row in TABLE.values())


@pytest.mark.parametrize("row", ROWS)
def test_composition(row: str) -> None:
    def result(column: str) -> Any:
        def function(arrays: Arrays) -> Array:
            return COLUMNS[column](**arrays, causal=True)

        return jax.jit(ROWS[row](function))(ARRAYS)

    assert TABLE[row]["standard"]
    expected = jax.tree.leaves(result("standard"))
    assert all(np.abs(np.asarray(x)).max() > 1e-3 for x in expected)
    for column, works in TABLE[row].items():
        if not works:
            with pytest.raises((TypeError, NotImplementedError)):
                result(column)
        elif column != "standard":
            for x, y in zip(jax.tree.leaves(result(column)), expected, strict=True):
                close(f"{row}, {column}", x, y, 1e-4)
