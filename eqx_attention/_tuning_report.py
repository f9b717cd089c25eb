"""What a tuning found, to be printed and drawn."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from ._tuning_cache import Table
from ._tuning_search import Candidate


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What [`eqx_attention.tuning.tune`][] found; `print` shows it as a table.

    **Fields:**

    - `winner`: the fastest.
    - `rule`: what is taken where nothing is tuned.
    - `seconds`: of each candidate that was timed, one number a round; first those of
        the last rounds, the fastest of them first. Not all were in the same rounds: a
        ratio is fair within the last ones only, as `speedup` is.
    - `speedup`: how many times as long `rule` took, least times of the last rounds.
    - `failures`: of each candidate that could not run, the reason.
    - `num_candidates`: how many there were to choose from.
    - `entries`: what was found, by key, for [`eqx_attention.tuning.overlay`][].
    - `saved_to`: the file that has them now, if any.
    """

    winner: Candidate
    rule: Candidate
    seconds: Mapping[Candidate, tuple[float, ...]]
    speedup: float
    failures: Mapping[Candidate, str]
    num_candidates: int
    entries: Table
    saved_to: Path | None

    @override
    def __str__(self) -> str:
        width = max(len(str(c)) for c in (*self.seconds, *self.failures))
        lines = [next(iter(self.entries)), ""]
        for candidate, seconds in self.seconds.items():
            rounds = f"{len(seconds)} rounds"
            notes = ["winner"] * (candidate == self.winner)
            notes += ["rule"] * (candidate == self.rule)
            lines.append(
                f"{candidate!s:{width}}  {1e3 * min(seconds):10.3f} ms  "
                f"{rounds:>9}  {', '.join(notes)}".rstrip()
            )
        lines += [f"{c!s:{width}}  {reason}" for c, reason in self.failures.items()]
        lines.append(
            f"\n{len(self.seconds)} of {self.num_candidates} candidates were timed; "
            f"that of the rule takes {self.speedup:.2f} times as long as the winner"
        )
        lines.append(f"saved to {self.saved_to}" if self.saved_to else "not saved")
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> Any:
        """A map of times over chunk sizes, a panel for each backend that has any.

        **Arguments:** `path`: where to write it, if anywhere.

        **Returns:** a `matplotlib.figure.Figure`.

        **Raises:** `ImportError` without matplotlib.
        """
        try:
            figures: Any = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError(
                "plot needs matplotlib: pip install matplotlib"
            ) from error
        backends = list({c.backend: 0 for c in self.seconds if c.sizes is not None})
        figure = figures.Figure(figsize=(5.0 * max(len(backends), 1), 4.0))
        for number, backend in enumerate(backends, start=1):
            times = {
                c.sizes: 1e3 * min(s)
                for c, s in self.seconds.items()
                if c.backend is backend and c.sizes is not None
            }
            axes = figure.add_subplot(1, len(backends), number)
            query, key = zip(*times, strict=True)
            drawn = axes.scatter(query, key, c=list(times.values()), s=400, marker="s")
            for (x, y), time in times.items():
                axes.annotate(f"{time:.3g}", (x, y), ha="center", va="center")
            axes.set(
                title=backend.name, xlabel="queries at a time", ylabel="keys at a time"
            )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            figure.colorbar(drawn, label="ms")
        if path is not None:
            figure.savefig(path)
        return figure
