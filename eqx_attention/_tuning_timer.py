"""Times a call of an attention on real arrays, for candidates of tuning."""

import math
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ._attention import Attention
from ._jax import block_until_ready
from ._tuning_search import Candidate

SAMPLE_SECONDS = 0.02  # shorter calls are repeated for one sample
_TRAINED = ("query", "key", "value", "bias", "softmax_aux", "sink_bias")


class Timer:
    """Seconds of one call of a candidate, which is compiled at its first."""

    def __init__(
        self,
        attention: Attention,
        given: dict[str, Any],
        gradient: bool,
        say: Callable[[str], None],
    ) -> None:
        self.attention, self.gradient, self.say = attention, gradient, say
        trained = {n: x for n, x in given.items() if n in _TRAINED and x is not None}
        self.arguments = trained, {n: x for n, x in given.items() if n not in trained}
        self.programs: dict[Candidate, tuple[Callable[..., Any], int]] = {}

    def __call__(self, candidate: Candidate) -> float:
        self.say(str(candidate))
        if candidate not in self.programs:
            run = self._program(candidate)
            self._seconds(run, 1)  # compiles
            repeats = math.ceil(SAMPLE_SECONDS / max(self._seconds(run, 1), 1e-6))
            self.programs[candidate] = run, repeats
        return self._seconds(*self.programs[candidate])

    def _program(self, candidate: Candidate) -> Callable[..., Any]:
        attend = Attention(
            self.attention.config,
            candidate.backend,
            candidate.chunk_sizes,
            self.attention.inference,
        )

        def forward(trained: dict[str, Any], rest: dict[str, Any]) -> Any:
            return attend(**trained, **rest)

        def loss(trained: dict[str, Any], rest: dict[str, Any]) -> Any:
            # Squared, so that the cotangent is an array like any other.
            return jnp.sum(jnp.square(forward(trained, rest)), dtype=jnp.float32)

        if self.gradient:
            return eqx.filter_jit(eqx.filter_value_and_grad(loss))
        return eqx.filter_jit(forward)

    def _seconds(self, run: Callable[..., Any], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            block_until_ready(run(*self.arguments))
        return (time.perf_counter() - start) / repeats
