"""Who is timed in decoding: this package, others, and a plain reading of the bytes."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import eqx_attention as eqxa

from .decoding import DecodeArrays, Decoding
from .machine import num_cores
from .peers import Peer, Program, planned_bytes


class Decoder(Peer[Decoding, DecodeArrays]):
    """A peer that can do every step of decoding."""

    def lacks(self, workload: Decoding) -> str | None:
        return None


class JaxDecoder(Decoder):
    """A function of JAX arrays."""

    def __init__(
        self, name: str, module: str, attend: Callable[[DecodeArrays], Array]
    ) -> None:
        self.name, self.module, self._attend = name, module, attend

    def prepare(self, workload: Decoding, arrays: DecodeArrays) -> Program:
        return _compiled(self._attend, arrays)


class Reading(Decoder):
    """The sum of as many numbers as the sequences see, where they lie side by side."""

    name, module = "read", "jax"

    def prepare(self, workload: Decoding, arrays: DecodeArrays) -> Program:
        return _compiled(jnp.sum, jnp.ones(workload.num_valid(), workload.dtype))


class TorchLoop(Decoder):
    """PyTorch's attention, sequence by sequence, each on its part of the cache."""

    name, module = "torch loop", "torch"

    def prepare(self, workload: Decoding, arrays: DecodeArrays) -> Program:
        torch = importlib.import_module("torch")
        torch.set_num_threads(num_cores())
        query, key, value = (torch.from_dlpack(x) for x in arrays[:3])
        attend = torch.nn.functional.scaled_dot_product_attention

        def run() -> Any:
            with torch.no_grad():
                outputs = [
                    attend(
                        query[i : i + 1, :, None],
                        key[i : i + 1, :length].transpose(1, 2),
                        value[i : i + 1, :length].transpose(1, 2),
                        enable_gqa=True,
                    )
                    for i, length in enumerate(workload.lengths)
                ]
                return torch.cat(outputs)

        return Program(run, lambda: [run()[:, :, 0].double().numpy()])


def _compiled(function: Callable[..., Array], argument: Any) -> Program:
    start = time.perf_counter()
    compiled = jax.jit(function).lower(argument).compile()
    seconds = time.perf_counter() - start

    def run() -> Array:
        return jax.block_until_ready(compiled(argument))

    def read() -> list[np.ndarray]:
        return [np.asarray(run()).astype(np.float64)]

    return Program(run, read, *planned_bytes(compiled), seconds)


def _ragged(a: DecodeArrays) -> Array:
    return eqxa.ragged_decode_attention(*a[:5])


def _paged(a: DecodeArrays) -> Array:
    return eqxa.paged_decode_attention(
        a.query, a.key_pages, a.value_pages, a.page_table, a.start, a.end
    )


_OF_EJKERNEL = "ejkernel.kernels._xla.ragged_decode_attention"


def _ejkernel(a: DecodeArrays) -> Array:
    module = importlib.import_module(_OF_EJKERNEL)
    return module.ragged_decode_attention(*a[:5])


DECODERS: dict[str, Decoder] = {
    decoder.name: decoder
    for decoder in (
        JaxDecoder("ragged", "eqx_attention", _ragged),
        JaxDecoder("paged", "eqx_attention", _paged),
        Reading(),
        TorchLoop(),
        JaxDecoder("ejkernel decode", _OF_EJKERNEL, _ejkernel),
    )
}
