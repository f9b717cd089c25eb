"""What is measured beside time: planned memory, compilation, and the error."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from tests import reference

from .peers import FLASH, PEERS, planned_bytes
from .workloads import Workload

KINDS = {
    "forward": Workload(0),
    "gradient": Workload(0, gradient=True),
    "forward with dropout": Workload(0, dropout=0.1),
    "gradient with dropout": Workload(0, gradient=True, dropout=0.1),
}
FOOTPRINT_LENGTHS = (4096, 16384, 65536)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What it takes to compile flash attention, and the memory it will need."""

    kind: str
    length: int
    input_bytes: int
    temp_bytes: int
    compile_seconds: float


def footprints(num_times: int) -> Iterator[Footprint]:
    """Compiles for each kind and length; seconds are the median of a few times."""
    for kind, workload in KINDS.items():
        seconds: dict[int, list[float]] = {n: [] for n in FOOTPRINT_LENGTHS}
        temp_bytes: dict[int, int] = {}
        for _ in range(num_times):
            for n in FOOTPRINT_LENGTHS:
                at_length = dataclasses.replace(workload, length=n)
                jax.clear_caches()  # tracing is paid for each time, as in a new process
                compiled, taken = FLASH.compile(at_length, at_length.shapes())
                seconds[n].append(taken)
                temp_bytes[n] = planned_bytes(compiled)[0] or 0
        for n in FOOTPRINT_LENGTHS:
            size = dataclasses.replace(workload, length=n).input_bytes()
            median = float(np.median(seconds[n]))
            yield Footprint(kind, n, size, temp_bytes[n], median)


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The error of one peer against float64, over output or all gradients."""

    workload: Workload
    peer: str
    relative_rms: float
    largest: float


def accuracies(workload: Workload, peers: Iterable[str]) -> Iterator[Accuracy]:
    """The error of each peer that can do this workload, on the same inputs."""
    arrays = workload.arrays()
    exact = _in_float64(workload)
    for name in peers:
        peer = PEERS[name]
        if peer.missing() or peer.lacks(workload):
            continue
        found = peer.prepare(workload, arrays).read()
        difference = _flat(found) - exact
        yield Accuracy(
            workload,
            name,
            float(np.linalg.norm(difference) / np.linalg.norm(exact)),
            float(np.abs(difference).max()),
        )


def _in_float64(workload: Workload) -> np.ndarray:
    arrays = (np.asarray(x).astype(np.float64) for x in workload.arrays()[:4])
    query, key, value, cotangent = arrays
    options = dict(causal=workload.causal, sliding_window=workload.window)
    if not workload.gradient:
        return _flat([reference.attention(query, key, value, **options).output])
    found = reference.gradients(query, key, value, cotangent, **options)
    return _flat([found[name] for name in ("query", "key", "value")])


def _flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.ravel() for x in arrays])
