"""Writes what was measured: tables, JSON, and three pictures."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib

from .bars import Verdict
from .measures import Accuracy, Footprint
from .timing import Outcome, Row, ratio
from .tunings import Tuned
from .workloads import BATCHES, DECODERS, EJKERNEL, LENGTHS, SPREADS

MIB = 2**20
OURS = ("flash", "ragged")

Curves = dict[str, dict[int, float]]  # by name, what belongs to a length or a batch


@dataclasses.dataclass
class Report:
    """All of a run."""

    environment: dict[str, str]
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    footprints: list[Footprint] = dataclasses.field(default_factory=list)
    accuracies: list[Accuracy] = dataclasses.field(default_factory=list)
    tunings: list[Tuned] = dataclasses.field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Writes results.md, results.json, time.png, memory.png and decode.png."""
        folder.mkdir(parents=True, exist_ok=True)
        found = dataclasses.asdict(self)
        for verdict, entry in zip(self.verdicts, found["verdicts"], strict=True):
            entry["met"] = verdict.met
        (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "results.md").write_text(self.markdown())
        for name, label, measure in (
            ("time.png", "time of a call (ms)", _milliseconds),
            ("memory.png", "temporary memory (MiB)", _mebibytes),
        ):
            panels = {w: self._causal(w, measure) for w in ("forward", "gradient")}
            _draw(folder / name, panels, label, "length (tokens)", LENGTHS)
        panels = {f"{spread} lengths": self._decoding(spread) for spread in SPREADS}
        label = "time of a step / time to read its bytes"
        _draw(folder / "decode.png", panels, label, "sequences", BATCHES)

    def markdown(self) -> str:
        """The whole report."""
        parts = ["# Measured side by side"]
        parts.append("\n".join(f"- {k}: {v}" for k, v in self.environment.items()))
        if self.missing:
            parts.append("Left out:")
            parts.append("\n".join(f"- {k}: {v}" for k, v in self.missing.items()))
        parts += ["## Bars", self.bars()]
        parts.append("## Times")
        parts.append(
            "Medians over rounds in which each ran once, in turn. The ratio is that of "
            "medians; in brackets, 10th and 90th percentile of the ratios of single "
            "rounds. Memory is what XLA plans beside arguments and results."
        )
        for outcome in self.outcomes:
            parts += [f"### {outcome.name}", self._times(outcome)]
        if self.footprints:
            parts += ["## Memory and compilation of flash attention", self._memory()]
        if self.accuracies:
            parts += ["## Errors against float64", self._errors()]
        if self.tunings:
            parts += ["## Tuned chunk sizes against the full grid", self._tunings()]
        if self.outcomes:
            parts += ["![Time against length](time.png)"]
            parts += ["![Memory against length](memory.png)"]
            parts += ["![Decoding against reading](decode.png)"]
        return "\n\n".join(parts) + "\n"

    def bars(self) -> str:
        """Every bar that this run measured, and whether it is met."""
        rows = []
        for v in self.verdicts:
            measured, met = "-", {True: "yes", False: "**no**", None: v.note}[v.met]
            if v.measured is not None:
                measured = f"{v.measured:.3g} {v.unit}"
            if v.spread is not None:
                measured += f" ({v.spread[0]:.3g} to {v.spread[1]:.3g})"
            rows.append((v.what, measured, f"{v.limit:g} {v.unit}", met))
        return _table(("", "measured", "at most", "met"), rows)

    def _times(self, outcome: Outcome) -> str:
        ours = outcome.fastest(OURS)
        rows = []
        for row in outcome.rows:
            if row.peer in self.missing:
                continue
            compared = "-"
            if row.seconds and ours not in (None, row):
                middle, low, high = ratio(ours, row)
                compared = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            taken = f"{1e3 * row.median:.2f}" if row.seconds else f"- ({row.left_out})"
            memory, seconds = row.temp_bytes, row.compile_seconds
            rows.append(
                (
                    row.label,
                    taken,
                    str(len(row.seconds)),
                    compared,
                    "-" if memory is None else f"{memory / MIB:.1f}",
                    "-" if seconds is None else f"{seconds:.2f}",
                )
            )
        compared = f"{ours.label if ours else 'ours'} / this"
        head = ("", "ms", "rounds", compared, "memory (MiB)", "compilation (s)")
        return _table(head, rows)

    def _memory(self) -> str:
        rows = (
            (
                f.kind,
                str(f.length),
                f"{f.temp_bytes / MIB:.1f}",
                f"{f.temp_bytes / f.input_bytes:.2f}",
                f"{f.compile_seconds:.2f}",
            )
            for f in self.footprints
        )
        head = ("", "length", "memory (MiB)", "of the inputs' bytes", "compilation (s)")
        return _table(head, rows)

    def _errors(self) -> str:
        rows = (
            (
                f"{'gradient' if a.workload.gradient else 'forward'} of"
                f" {a.workload.length} in {a.workload.dtype}",
                a.peer,
                f"{a.relative_rms:.2e}",
                f"{a.largest:.2e}",
            )
            for a in self.accuracies
        )
        return _table(("", "", "relative, root mean square", "largest"), rows)

    def _tunings(self) -> str:
        rows = (
            (
                t.name,
                t.chosen,
                t.best,
                f"{t.num_timed} of {t.num_candidates}",
                f"{t.of_best:.3f} ({t.spread[0]:.2f} to {t.spread[1]:.2f})",
                f"{t.of_rule:.2f}",
            )
            for t in self.tunings
        )
        head = ("", "chosen", "best", "timed", "chosen / best", "chosen / default")
        return _table(head, rows)

    def _causal(self, what: str, measure: Callable[[Row], float | None]) -> Curves:
        """A measure against the length, for causal attention."""
        by_name = {outcome.name: outcome for outcome in self.outcomes}
        curves: Curves = {}
        for length in LENGTHS:
            outcome = by_name.get(f"{what} causal {length}")
            for row in outcome.rows if outcome else ():
                name = "ejkernel, best" if row.label in EJKERNEL else row.label
                value, curve = measure(row), curves.setdefault(name, {})
                if value is not None:
                    curve[length] = min(value, curve.get(length, value))
        return curves

    def _decoding(self, spread: str) -> Curves:
        """Time over the time to read as many bytes, against the number of sequences."""
        by_name = {outcome.name: outcome for outcome in self.outcomes}
        curves: Curves = {name: {} for name in DECODERS if name != "read"}
        for batch in BATCHES:
            outcome = by_name.get(f"decode {batch} {spread}")
            reading = outcome.fastest(("read",)) if outcome else None
            for row in outcome.rows if outcome and reading else ():
                if row.seconds and row is not reading:
                    curves[row.label][batch] = row.median / reading.median
        return curves


def _milliseconds(row: Row) -> float | None:
    return 1e3 * row.median if row.seconds else None


def _mebibytes(row: Row) -> float | None:
    return row.temp_bytes / MIB if row.temp_bytes else None


def _draw(
    path: Path,
    panels: dict[str, Curves],
    ylabel: str,
    xlabel: str,
    ticks: Sequence[int],
) -> None:
    """Panels side by side, log-log."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(10, 4.5), sharey=True)
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        for i, (name, curve) in enumerate(curves.items()):
            if curve:
                style = dict(marker="osx^v+D*"[i % 8], color=f"C{i}", label=name)
                panel.plot(curve.keys(), curve.values(), **style)
        panel.set(title=title, xlabel=xlabel, xscale="log", yscale="log")
        panel.set_xticks(ticks, [str(n) for n in ticks], rotation=45)
        panel.xaxis.set_minor_locator(plt.NullLocator())
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    axes[0].set_ylabel(ylabel)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines
    )
