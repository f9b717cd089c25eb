"""What this package holds itself to, and whether it does."""

import dataclasses
from collections.abc import Iterator, Sequence

from .measures import Accuracy, Footprint
from .timing import Outcome, ratio
from .tunings import Tuned
from .workloads import BATCHES, EJKERNEL, SPREADS


@dataclasses.dataclass(frozen=True)
class TimeBar:
    """`ours` takes at most `limit` times as long as the fastest of `against`.

    If none of `against` ran, the fastest of `otherwise` takes their place.
    """

    contest: str
    ours: str
    against: tuple[str, ...]
    limit: float
    otherwise: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A bar and what was measured; `met` is None if nothing could be."""

    what: str
    limit: float
    measured: float | None
    spread: tuple[float, float] | None = None
    note: str = ""
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """Whether the bar is met."""
        return None if self.measured is None else self.measured <= self.limit


def _time_bars() -> Iterator[TimeBar]:
    for contest, of_torch, of_ejkernel, of_jax in (
        ("forward causal 2048", 1.1, 0.42, 0.25),
        ("forward causal 4096", 1.1, 0.42, 0.25),
        ("forward full 4096", 1.1, 0.75, 0.35),
        ("gradient causal 2048", 1.1, 0.25, 0.35),
        ("gradient full 2048", 1.1, 0.42, 0.7),
    ):
        yield TimeBar(contest, "flash", ("torch",), of_torch)
        yield TimeBar(contest, "flash", EJKERNEL, of_ejkernel)
        yield TimeBar(contest, "flash", ("jax.nn",), of_jax)
    for what in ("forward", "gradient"):
        yield TimeBar(
            f"{what} causal 16384",
            *("flash", ("tokamax",), 0.35),
            otherwise=(*EJKERNEL, "jax.nn", "eqx.nn"),
        )
    for contest, baseline, limit in (
        ("forward window (255, 0) at 8192", "causal", 0.17),
        ("gradient window (255, 0) at 8192", "causal", 0.2),
        ("forward 16 documents at 8192", "causal", 0.2),
        ("forward 4 x 16 ragged documents at 8192", "causal", 0.2),
        ("forward GQA 8/2", "ungrouped", 1.0),
        ("gradient GQA 8/2", "ungrouped", 1.0),
        ("forward bfloat16", "float32", 1.2),
        ("gradient bfloat16", "float32", 1.2),
    ):
        yield TimeBar(contest, "flash", (f"flash {baseline}",), limit)
    for what in ("forward", "gradient"):
        for length in (128, 256, 512):
            contest = f"{what} causal {length}"
            yield TimeBar(contest, "AUTO", ("jax.nn", "standard"), 1.05)
        for length in (512, 1024):
            yield TimeBar(f"{what} causal {length}", "standard", ("jax.nn",), 1.05)
    contest = "value and tangent causal 4096"
    yield TimeBar(contest, "flash BOTH", ("flash forward",), 2.6)
    yield TimeBar(
        "gradient causal 4096 in the mode BOTH", "flash BOTH", ("flash",), 1.1
    )
    for batch in BATCHES:
        for spread in SPREADS:
            contest = f"decode {batch} {spread}"
            yield TimeBar(contest, "ragged", ("ejkernel decode",), 0.05)
            yield TimeBar(contest, "ragged", ("torch loop",), 0.7)
            yield TimeBar(contest, "ragged", ("read",), 2.5)  # 2 is what it aims at
            yield TimeBar(contest, "paged", ("ragged",), 1.3)
    yield TimeBar("decode 4 of 1000 in 32k", "ragged", ("ragged in 2k",), 1.2)


def judge_times(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """One verdict for each bar whose contest was run."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    for bar in _time_bars():
        if bar.contest not in by_name:
            continue
        outcome = by_name[bar.contest]
        ours = outcome.fastest((bar.ours,))
        theirs = outcome.fastest(bar.against) or outcome.fastest(bar.otherwise)
        what = f"{bar.contest}: {bar.ours} / "
        if ours is None or theirs is None:
            names = (bar.ours,) if ours is None else bar.against + bar.otherwise
            reasons = {
                f"{row.label}: {row.left_out}"
                for row in outcome.rows
                if row.label in names
            }
            note = "; ".join(sorted(reasons)) or "not in this run"
            yield Verdict(what + " or ".join(bar.against), bar.limit, None, note=note)
        else:
            middle, low, high = ratio(ours, theirs)
            yield Verdict(what + theirs.label, bar.limit, middle, (low, high))


def judge_footprints(footprints: Sequence[Footprint]) -> Iterator[Verdict]:
    """Memory and compilation of flash attention."""
    at = {(f.kind, f.length): f for f in footprints}
    for kind, of_inputs, seconds in (
        ("forward", 2.0, 4.0),
        ("gradient", 3.0, 8.0),
        ("forward with dropout", 4.0, None),
        ("gradient with dropout", 4.0, None),
    ):
        if (kind, 65536) not in at:
            continue
        short, middle, long = (at[kind, n] for n in (4096, 16384, 65536))
        yield Verdict(
            f"{kind}: temporary memory at 64k / bytes of query, key and value",
            *(of_inputs, long.temp_bytes / long.input_bytes),
        )
        yield Verdict(
            f"{kind}: temporary memory at 64k / at 16k",
            *(4.2, long.temp_bytes / middle.temp_bytes),
        )
        yield Verdict(
            f"{kind}: compilation for 64k / for 4k",
            *(1.5, long.compile_seconds / short.compile_seconds),
        )
        if seconds is not None:
            what = f"{kind}: compilation for 64k"
            yield Verdict(what, seconds, long.compile_seconds, unit="s")


def judge_tunings(tunings: Sequence[Tuned]) -> Iterator[Verdict]:
    """What a tuning chose against the best of the full grid."""
    for t in tunings:
        what = f"tuned for {t.name}: chosen / best of the grid"
        yield Verdict(what, 1.05, t.of_best, t.spread)


def judge_accuracies(accuracies: Sequence[Accuracy]) -> Iterator[Verdict]:
    """Errors against those of jax.nn: the mean and the largest, whichever is worse."""
    of_jax = {a.workload: a for a in accuracies if a.peer == "jax.nn"}
    for a in accuracies:
        if a.peer in ("flash", "standard"):
            theirs = of_jax[a.workload]
            what = "gradient" if a.workload.gradient else "forward"
            yield Verdict(
                f"{what} {a.workload.dtype}: error of {a.peer} / of jax.nn",
                1.5,
                max(a.relative_rms / theirs.relative_rms, a.largest / theirs.largest),
            )
