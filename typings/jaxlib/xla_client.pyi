"""The old home of `Device`, from where JAX's signatures still import it."""

from typing import Any

from jaxlib._jax import Device as Device

# The rest of the module is private to JAX.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
