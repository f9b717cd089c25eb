"""Who is timed: this package and others, each behind `prepare`.

Others are imported only when they are looked for, as none of them has to be there.
"""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import equinox.nn._attention as of_equinox
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Compiled

import eqx_attention as eqxa

from .machine import num_cores
from .workloads import Arrays, Workload, same_document, visible

W, A = TypeVar("W"), TypeVar("A")  # a workload and its arrays


class Program(NamedTuple):
    """A call that is ready to be made.

    `run` makes it once, and waits for it. `read` does so too, and returns the output,
    or the gradients of query, key and value, as `batch length heads dim`. What is None
    is not known of this peer.
    """

    run: Callable[[], object]
    read: Callable[[], list[np.ndarray]]
    temp_bytes: int | None = None
    needed_bytes: int | None = None
    compile_seconds: float | None = None


class Peer(ABC, Generic[W, A]):
    """An attention to be timed."""

    name: str
    module: str

    def missing(self) -> str | None:
        """Why it can't be had at all."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            own = error.name == self.module.partition(".")[0]
            return "not installed" if own else f"{error.name} is not installed"
        except Exception as error:  # what a peer raises on a JAX it was not made for
            return f"its import fails: {first_line(error)}"
        return None

    @abstractmethod
    def lacks(self, workload: W) -> str | None:
        """Why it can't do this workload."""

    @abstractmethod
    def prepare(self, workload: W, arrays: A) -> Program:
        """Compiles what is to be compiled, and lays out the arrays as the peer does."""


def first_line(error: Exception) -> str:
    """The message, cut to what fits into a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:100]}"


Attend = Callable[[Workload, Array, Array, Array, Array | None], Array]


class JaxPeer(Peer[Workload, Arrays]):
    """A function of JAX arrays, `batch length heads dim`."""

    def __init__(
        self,
        name: str,
        module: str,
        attend: Attend,
        *,
        grouped: bool = True,
        dropout: bool = False,
        block: int = 1,
    ) -> None:
        self.name, self.module, self._attend = name, module, attend
        self._grouped, self._dropout, self._block = grouped, dropout, block

    def lacks(self, workload: Workload) -> str | None:
        if workload.kv_heads != workload.q_heads and not self._grouped:
            return "it has no grouped heads"
        if workload.dropout and not self._dropout:
            return "its dropout is another one"
        if self._block > max(workload.length, 256):
            return "its block is longer than the sequence"
        return None

    def compile(self, workload: Workload, arrays: Arrays) -> tuple[Compiled, float]:
        """The compiled function, for arrays or shapes; and the seconds it took."""

        def forward(query: Array, key: Array, value: Array, a: Arrays) -> Array:
            return self._attend(workload, query, key, value, a.segment_ids)

        def loss(query: Array, key: Array, value: Array, a: Arrays) -> Array:
            weighted = forward(query, key, value, a) * a.cotangent
            return jnp.sum(weighted, dtype=jnp.float32)

        def tangent(query: Array, key: Array, value: Array, a: Arrays) -> Any:
            points = query, key, value
            return jax.jvp(lambda *points: forward(*points, a), points, points)

        # The value as well: without it a peer need not make its output at all.
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
        function = forward
        if workload.gradient:
            function = gradient
        elif workload.tangent:
            function = tangent
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*arrays[:3], arrays).compile()
        return compiled, time.perf_counter() - start

    def prepare(self, workload: Workload, arrays: Arrays) -> Program:
        compiled, seconds = self.compile(workload, arrays)

        def run() -> Any:
            return jax.block_until_ready(compiled(*arrays[:3], arrays))

        def read() -> list[np.ndarray]:
            result = run()
            found = [result]
            if workload.gradient or workload.tangent:
                found = jax.tree.leaves(result[1])
            return [np.asarray(x).astype(np.float64) for x in found]

        temp_bytes, needed_bytes = planned_bytes(compiled)
        return Program(run, read, temp_bytes, needed_bytes, seconds)


def planned_bytes(compiled: Compiled) -> tuple[int | None, int | None]:
    """What XLA plans beside arguments and results, and what it needs with these."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None, None
    temp = memory.temp_size_in_bytes
    return temp, temp + memory.argument_size_in_bytes + memory.output_size_in_bytes


def _ours(name: str, function: Callable[..., Array]) -> JaxPeer:
    def attend(w: Workload, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
        return function(
            *(q, k, v),
            causal=w.causal,
            sliding_window=w.window,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            dropout_prob=w.dropout,
            dropout_key=jax.random.key(0) if w.dropout else None,
        )

    return JaxPeer(name, "eqx_attention", attend, dropout=True)


def _as_in_jax(module: str, implementation: str) -> Attend:
    def attend(w: Workload, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
        return importlib.import_module(module).dot_product_attention(
            *(q, k, v),
            mask=None if ids is None else same_document(ids),
            is_causal=w.causal,
            local_window_size=w.window,
            implementation=implementation,
        )

    return attend


def _eqx_nn(w: Workload, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
    mask = visible(w, ids)
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0], (w.batch, w.length, w.length))
    over_heads = jax.vmap(
        of_equinox.dot_product_attention, in_axes=(1, 1, 1, None), out_axes=1
    )
    return jax.vmap(over_heads)(q, k, v, mask)


def _ejkernel(block: int) -> JaxPeer:
    module = "ejkernel.kernels._xla.flash_attention"

    def attend(w: Workload, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
        params = importlib.import_module("ejkernel.ops").FwdParams
        return importlib.import_module(module).flash_attention(
            *(q, k, v),
            causal=w.causal,
            sliding_window=w.window,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            fwd_params=params(q_blocksize=block, kv_blocksize=block),
        )

    return JaxPeer(f"ejkernel {block}", module, attend, block=block)


class Torch(Peer[Workload, Arrays]):
    """PyTorch's own, on all cores; heads come first there, and lie contiguously."""

    name = module = "torch"

    def lacks(self, workload: Workload) -> str | None:
        if workload.tangent:
            return "it has no forward mode here"
        return "its dropout is another one" if workload.dropout else None

    def prepare(self, workload: Workload, arrays: Arrays) -> Program:
        torch = importlib.import_module("torch")
        torch.set_num_threads(num_cores())
        w = workload

        def heads_first(x: Array) -> Any:
            x = torch.from_numpy(np.array(x.astype(jnp.float32)))
            return x.to(getattr(torch, w.dtype)).transpose(1, 2).contiguous()

        query, key, value, cotangent = (heads_first(x) for x in arrays[:4])
        is_causal, mask = w.causal, None
        if w.window is not None or arrays.segment_ids is not None:
            is_causal, mask = False, visible(w, arrays.segment_ids)
            mask = torch.from_numpy(np.array(mask))

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                *(query, key, value),
                attn_mask=mask,
                is_causal=is_causal,
                enable_gqa=w.q_heads != w.kv_heads,
            )

        def run() -> Any:
            if not w.gradient:
                with torch.no_grad():
                    return [forward()]
            loss = (forward() * cotangent).sum()
            return torch.autograd.grad(loss, (query, key, value))

        if w.gradient:
            for x in (query, key, value):
                x.requires_grad_()

        def read() -> list[np.ndarray]:
            return [x.transpose(1, 2).double().numpy() for x in run()]

        return Program(run, read)


BOTH = eqxa.Differentiation.BOTH
FLASH = _ours("flash", eqxa.flash_attention)
PEERS: dict[str, Peer[Workload, Arrays]] = {
    peer.name: peer
    for peer in (
        FLASH,
        _ours("flash BOTH", partial(eqxa.flash_attention, differentiation=BOTH)),
        _ours("standard", eqxa.standard_attention),
        _ours("AUTO", eqxa.attention),
        JaxPeer("jax.nn", "jax", _as_in_jax("jax.nn", "xla")),
        JaxPeer("eqx.nn", "equinox", _eqx_nn, grouped=False),
        *(_ejkernel(block) for block in (256, 512, 1024)),
        Torch(),
        JaxPeer("tokamax", "tokamax", _as_in_jax("tokamax", "xla_chunked")),
    )
}
