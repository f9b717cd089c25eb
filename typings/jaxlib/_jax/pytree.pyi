"""The type of a pytree's structure, which `jax.tree_util` re-exports."""

from collections.abc import Iterable
from typing import Any

class PyTreeDef:
    num_leaves: int
    num_nodes: int
    def children(self) -> list[PyTreeDef]: ...
    def unflatten(self, leaves: Iterable[Any], /) -> Any: ...

# The rest of the module is private to JAX.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
