"""Finds a fast candidate by few timings. What is timed is the caller's affair."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from ._backend import Backend
from ._config import ChunkSizes

FINALISTS = 4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A backend and its chunk sizes; None for one that has none."""

    backend: Backend
    chunk_sizes: ChunkSizes | None = None

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Queries and keys at a time."""
        sizes = self.chunk_sizes
        return None if sizes is None else (sizes.query, sizes.key)

    @override
    def __str__(self) -> str:
        if self.sizes is None:
            return self.backend.name
        return f"{self.backend.name} {self.sizes[0]} x {self.sizes[1]}"


class Race:
    """Seconds of candidates, timed in turn, round after round.

    What else runs on the machine only adds to a time, and adds to all that take part
    in a round: so the least time within the same rounds is what counts.
    """

    def __init__(self, time: Callable[[Candidate], float]) -> None:
        self.time = time
        self.seconds: dict[Candidate, list[float]] = {}
        self.failures: dict[Candidate, str] = {}

    def run(self, candidates: Iterable[Candidate], rounds: int) -> list[Candidate]:
        """Those that ran, the fastest first."""
        racing = list(dict.fromkeys(candidates))
        here: dict[Candidate, float] = {}
        for number in range(rounds):
            first = number % len(racing)  # nobody always has the same one before it
            for candidate in racing[first:] + racing[:first]:
                if candidate not in self.failures:
                    self._time(candidate, here)
        return sorted(here, key=here.__getitem__)

    def fastest(self) -> list[Candidate]:
        """All that ran, the one with the least time first."""
        ran = self.seconds.keys() - self.failures.keys()
        return sorted(ran, key=lambda candidate: min(self.seconds[candidate]))

    def _time(self, candidate: Candidate, here: dict[Candidate, float]) -> None:
        try:
            seconds = self.time(candidate)
        except Exception as error:  # too much memory, say: the others go on
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.failures[candidate] = lines[0]
            here.pop(candidate, None)
            return
        self.seconds.setdefault(candidate, []).append(seconds)
        here[candidate] = min(seconds, here.get(candidate, seconds))


def explore(
    race: Race, candidates: Sequence[Candidate], starts: Sequence[Candidate]
) -> None:
    """Times some of the candidates: those on the way from a start to the fastest.

    A pattern search (Hooke & Jeeves 1961) over the grid of each start's backend: it
    moves to the fastest neighbour two steps away, as long as one is faster, then one
    step.
    """
    for start in starts:
        grid = _Grid([p for p in (start, *candidates) if p.backend == start.backend])
        best = start
        for step in (2, 1):
            while True:
                near = grid.neighbours(best, step)
                new = [candidate for candidate in near if candidate not in race.seconds]
                ranked = race.run((best, *new), 2)
                if not ranked or ranked[0] == best:
                    break
                best = ranked[0]


def decide(race: Race, starts: Sequence[Candidate], rounds: int) -> list[Candidate]:
    """Times the fastest again, and returns those of the last rounds, fastest first.

    The slower half drops out after some rounds, the rest run twice as many, as in
    successive halving (Jamieson & Talwalkar 2016, arXiv 1502.07943). The starts stay to
    the end, to compare with.
    """
    ranked = race.fastest()
    starts = [start for start in starts if start in ranked]
    racing = ranked[:FINALISTS]
    while len(racing) > 1:
        ranked = race.run((*racing, *starts), rounds)
        rounds, racing = 2 * rounds, ranked[: len(racing) // 2]
    return ranked


class _Grid:
    """Candidates of one backend by their sizes."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = {p.sizes: p for p in candidates if p.sizes is not None}
        self.axes = [
            sorted({sizes[axis] for sizes in self.candidates}) for axis in (0, 1)
        ]

    def neighbours(self, candidate: Candidate, step: int) -> list[Candidate]:
        """Those that are `step` sizes away along one axis."""
        if candidate.sizes is None:
            return []
        found: list[Candidate] = []
        for axis in (0, 1):
            sizes = self.axes[axis]
            for move in (-step, step):
                index = sizes.index(candidate.sizes[axis]) + move
                if 0 <= index < len(sizes):
                    moved = list(candidate.sizes)
                    moved[axis] = sizes[index]
                    if (near := self.candidates.get((moved[0], moved[1]))) is not None:
                        found.append(near)
        return found
