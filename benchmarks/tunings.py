"""Whether the few timings of a tuning find what those of the full grid find."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

import eqx_attention as eqxa
from eqx_attention import tuning
from eqx_attention._tuning_search import Race, decide, explore
from eqx_attention._tuning_timer import Timer

from .workloads import Workload

# Small ones, as the full grid is compiled for each.
SHAPES = {
    "forward causal 512": Workload(512),
    "gradient causal 512": Workload(512, gradient=True),
    "forward window (127, 0) at 1024": Workload(
        1024, q_heads=4, kv_heads=4, window=(127, 0)
    ),
    "forward causal 1024": Workload(1024, q_heads=4, kv_heads=4),
    "forward full 512": Workload(512, causal=False),
    "forward GQA 8/2 1024": Workload(1024, kv_heads=2),
    "forward head dim 128": Workload(512, head_dim=128, q_heads=4, kv_heads=4),
    "forward bfloat16": Workload(512, dtype="bfloat16"),
    "forward batch 4": Workload(512, batch=4, q_heads=2, kv_heads=2),
    "gradient GQA 8/2": Workload(512, kv_heads=2, head_dim=32, gradient=True),
}
QUICK = tuple(SHAPES)[:1]
ROUNDS = 25


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was chosen for a shape, against the best of all and the default rule.

    A ratio is that of the least times over rounds in which the two ran in turn, as it
    is what a tuning goes by; `spread` are the 10th and 90th percentile of the ratios of
    single rounds.
    """

    name: str
    chosen: str
    best: str
    num_timed: int
    num_candidates: int
    of_best: float
    spread: tuple[float, float]
    of_rule: float


def tune_all(names: tuple[str, ...], say: Callable[[str], None]) -> Iterator[Tuned]:
    """Tunes for each shape, then times all there is."""
    for name in names:
        say(f"tuning: {name}")
        yield _tune(name, SHAPES[name])


def _tune(name: str, workload: Workload) -> Tuned:
    arrays = workload.arrays()
    qkv = {"query": arrays.query, "key": arrays.key, "value": arrays.value}
    config = eqxa.AttentionConfig(
        causal=workload.causal, sliding_window=workload.window
    )
    attend = eqxa.Attention(config, eqxa.Backend.FLASH)
    candidates = tuning.candidates(attend, **qkv)
    choice = attend.resolve(**qkv)
    rule = tuning.Candidate(choice.backend, choice.chunk_sizes)

    race = Race(Timer(attend, qkv, workload.gradient, lambda _: None))
    explore(race, candidates, [rule])
    chosen = decide(race, [rule], rounds=3)[0]
    num_timed = len(race.seconds)

    race.run(candidates, rounds=3)
    best = decide(race, [chosen, rule], rounds=3)[0]
    race.run((chosen, best, rule), ROUNDS)
    seconds = {c: np.asarray(race.seconds[c][-ROUNDS:]) for c in (chosen, best, rule)}
    low, high = np.percentile(seconds[chosen] / seconds[best], (10, 90))
    least = {c: float(s.min()) for c, s in seconds.items()}
    return Tuned(
        name,
        str(chosen),
        str(best),
        num_timed,
        len({*candidates, rule}),
        least[chosen] / least[best],
        (float(low), float(high)),
        least[chosen] / least[rule],
    )
