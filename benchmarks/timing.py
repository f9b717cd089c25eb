"""Runs a contest: each entry in turn, round after round, in one process."""

import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .decoders import DECODERS
from .decoding import DecodeArrays, Decoding
from .machine import available_bytes
from .peers import PEERS, Program, first_line
from .workloads import Arrays, Contest, Entry, Workload

SAMPLE_SECONDS = 0.02  # a sample is at least that long: short calls are repeated
PAUSE_SECONDS = 0.005  # threads that one peer leaves spinning come to rest
USABLE_MEMORY = 0.5  # XLA takes more than it plans, and others may want some, too


class Patience(NamedTuple):
    """How long a contest goes on: three rounds, then until either number is reached.

    A peer whose one call takes longer than `slowest` drops out.
    """

    rounds: int = 50
    seconds: float = 45.0
    slowest: float = 60.0


QUICK = Patience(seconds=2.0, slowest=10.0)


@dataclasses.dataclass
class Row:
    """What came out for one entry; `seconds` has one number for each round."""

    label: str
    peer: str
    workload: Workload | Decoding
    seconds: list[float] = dataclasses.field(default_factory=list)
    temp_bytes: int | None = None
    compile_seconds: float | None = None
    left_out: str | None = None

    @property
    def median(self) -> float:
        """The median of the rounds, in seconds."""
        return float(np.median(self.seconds))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came out of one contest."""

    name: str
    rows: list[Row]

    def fastest(self, labels: Sequence[str]) -> Row | None:
        """The one of these with the least median, if any of them ran."""
        ran = [row for row in self.rows if row.label in labels and row.seconds]
        return min(ran, key=lambda row: row.median, default=None)


def run_contest(
    contest: Contest, patience: Patience, say: Callable[[str], None]
) -> Outcome:
    """Prepares all entries, then times in rounds those that can run."""

    @functools.cache  # a cache of decoding is large: peers read the same one
    def arrays(workload: Workload | Decoding) -> Arrays | DecodeArrays:
        return workload.arrays()

    rows: list[Row] = []
    racing: list[tuple[Row, Program, int]] = []
    for entry in contest.entries:
        say(f"{contest.name}: prepares {entry.label}")
        row, program, seconds = _prepare(entry, patience, arrays)
        rows.append(row)
        if program is not None:
            racing.append((row, program, math.ceil(SAMPLE_SECONDS / seconds)))

    start, num_rounds, order = time.perf_counter(), 0, random.Random(0)
    while racing and num_rounds < patience.rounds:
        if num_rounds >= 3 and time.perf_counter() - start > patience.seconds:
            break
        order.shuffle(racing)  # so that nobody always has the same one before it
        for row, program, repeats in racing:
            time.sleep(PAUSE_SECONDS)
            row.seconds.append(_time(program, repeats))
        num_rounds += 1
        say(f"{contest.name}: round {num_rounds}")
    return Outcome(contest.name, rows)


def _prepare(
    entry: Entry,
    patience: Patience,
    arrays: Callable[[Workload | Decoding], Arrays | DecodeArrays],
) -> tuple[Row, Program | None, float]:
    """The entry's row and, if it can run, its program and how long a call takes."""
    row, program, seconds = Row(*entry), None, 0.0
    peer = {**PEERS, **DECODERS}[entry.peer]
    row.left_out = peer.missing() or peer.lacks(entry.workload)
    if row.left_out is not None:
        return row, None, 0.0
    try:
        program = peer.prepare(entry.workload, arrays(entry.workload))
        row.temp_bytes = program.temp_bytes
        row.compile_seconds = program.compile_seconds
        row.left_out = _too_large(program)
        if row.left_out is None:
            seconds = _time(program)
            if seconds < SAMPLE_SECONDS:
                seconds = _time(program)  # the first call is slower
            if seconds > patience.slowest:
                row.left_out = f"one call takes {seconds:.0f} s"
    except Exception as error:  # a peer that fails is a result, too
        row.left_out = first_line(error)
    return row, program if row.left_out is None else None, seconds


def _too_large(program: Program) -> str | None:
    free = available_bytes()
    if free is None or program.needed_bytes is None:
        return None
    if program.needed_bytes <= USABLE_MEMORY * free:
        return None
    needed = program.needed_bytes / 2**30
    return f"it needs {needed:.1f} GiB, {free / 2**30:.1f} are free"


def _time(program: Program, repeats: int = 1) -> float:
    """Seconds of one call, as the mean of a few in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        program.run()
    return (time.perf_counter() - start) / repeats


def ratio(ours: Row, theirs: Row) -> tuple[float, float, float]:
    """Ratio of the medians; and the 10th and 90th percentile of that of each round."""
    each = np.array(ours.seconds) / np.array(theirs.seconds)
    low, high = np.percentile(each, (10, 90))
    return ours.median / theirs.median, float(low), float(high)
