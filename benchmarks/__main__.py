"""Times attention side by side with others, and says which bars are met.

    python -m benchmarks                  # all; the better part of an hour
    python -m benchmarks --quick          # three minutes
    python -m benchmarks --only "causal 2048" memory --output somewhere
    python -m benchmarks --only decode --seconds 15

Parts are the contests of `workloads.py`, and "memory", "accuracy" and "tuning".
`--only` takes those with one of these texts in their name. `--seconds` is how long the
rounds of one contest go on, three rounds at least. The package is imported from where
it is installed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from . import bars, machine, measures, timing, tunings
from .decoders import DECODERS
from .peers import PEERS
from .report import Report
from .workloads import Workload, contests

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Reads the command line, measures, and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Times attention side by side."
    )
    parser.add_argument("--quick", action="store_true", help="in three minutes")
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", default=[""], help="parts named so"
    )
    parser.add_argument("--seconds", type=float, help="for each contest")
    parser.add_argument("--output", metavar="DIR", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    patience = timing.QUICK if arguments.quick else timing.Patience()
    if arguments.seconds is not None:
        patience = patience._replace(seconds=arguments.seconds)
    report = measure(arguments.quick, arguments.only, patience)
    report.environment["arguments"] = " ".join(sys.argv[1:]) or "none"
    report.write(arguments.output)
    print(*(f"{k}: {v}" for k, v in report.environment.items()), sep="\n")
    print(*(f"left out: {k}: {v}" for k, v in report.missing.items()), sep="\n")
    print(f"\n{report.bars()}\n\nAll of it is in {arguments.output}")


def measure(quick: bool, only: Sequence[str], patience: timing.Patience) -> Report:
    """Runs the parts with one of `only` in their names."""

    def is_asked_for(part: str) -> bool:
        return any(text in part for text in only)

    peers = {**PEERS, **DECODERS}
    missing = {name: reason for name, p in peers.items() if (reason := p.missing())}
    os.environ["EQX_ATTENTION_CACHE_DIR"] = "off"  # the defaults are what is measured
    # ejkernel's import turns it on: what is stored would not be compiled again.
    jax.config.update("jax_enable_compilation_cache", False)
    report = Report(machine.describe(), missing)
    chosen = [contest.shortened() if quick else contest for contest in contests()]
    chosen = [c for c in chosen if c.entries and is_asked_for(c.name)]
    exact = [
        Workload(512 if quick else 1024, dtype=dtype, gradient=gradient)
        for dtype in ("float32", "bfloat16")
        for gradient in (False, True)
        if is_asked_for("accuracy")
    ]
    judged = ("flash", "standard", "jax.nn") if quick else tuple(PEERS)
    with_memory = is_asked_for("memory")
    tuned = tunings.QUICK if quick else tuple(tunings.SHAPES)
    tuned = tuned if is_asked_for("tuning") else ()
    num_parts = len(chosen) + with_memory + len(exact) + len(tuned)

    with tqdm(total=num_parts, unit="part") as progress:
        for contest in chosen:
            outcome = timing.run_contest(contest, patience, progress.set_postfix_str)
            report.outcomes.append(outcome)
            progress.update()
        if with_memory:
            progress.set_postfix_str("memory and compilation")
            report.footprints += measures.footprints(num_times=1 if quick else 3)
            progress.update()
        for workload in exact:
            progress.set_postfix_str(f"accuracy in {workload.dtype}")
            report.accuracies += measures.accuracies(workload, judged)
            progress.update()
        for found in tunings.tune_all(tuned, progress.set_postfix_str):
            report.tunings.append(found)
            progress.update()
        progress.set_postfix_str("")

    report.verdicts += bars.judge_times(report.outcomes)
    report.verdicts += bars.judge_footprints(report.footprints)
    report.verdicts += bars.judge_accuracies(report.accuracies)
    report.verdicts += bars.judge_tunings(report.tunings)
    return report


if __name__ == "__main__":
    main()
