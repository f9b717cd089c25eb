"""The compiled half of JAX ships no types: these are the ones its signatures name."""

from typing import Any

class Device:
    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...

# The rest of the module is private to JAX.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
