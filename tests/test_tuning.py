"""Tuning finds what is fast by few timings, and says what it found."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqx_attention as eqxa
from eqx_attention import _tuning_cache as cache, _tuning_timer, tuning
from eqx_attention._tuning_search import Race, decide, explore
from eqx_attention.tuning import Candidate

from .helpers import qkv

FLASH, STANDARD = eqxa.Backend.FLASH, eqxa.Backend.STANDARD
GRID = tuple(
    Candidate(FLASH, eqxa.ChunkSizes(query, key))
    for query in tuning.SIZES
    for key in tuning.SIZES
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is; it isn't made yet."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(cache, "_tables", {})
    return tmp_path


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs to compile."""
    monkeypatch.setattr(tuning, "SIZES", (4, 8))
    monkeypatch.setattr(_tuning_timer, "SAMPLE_SECONDS", 1e-9)


def arrays(length: int = 16) -> tuple[Any, Any, Any]:
    made = qkv(batch=(1,), q_len=length, kv_len=length, kv_heads=4)
    query, key, value = (jnp.asarray(x) for x in made.values())
    return query, key, value


def found(race: Race, candidates: Any, start: Candidate) -> Candidate:
    explore(race, candidates, [start])
    return decide(race, [start], rounds=3)[0]


def valley(query: int, key: int, tilt: float = 0.0) -> Callable[[Candidate], float]:
    """A time that grows in all directions, by a quarter with each doubling."""

    def seconds(candidate: Candidate) -> float:
        assert candidate.sizes is not None
        steps = [
            math.log2(size / best)
            for size, best in zip(candidate.sizes, (query, key), strict=True)
        ]
        return 1.25 ** (abs(steps[0]) + abs(steps[1]) + tilt * abs(steps[0] - steps[1]))

    return seconds


@pytest.mark.parametrize("tilt", (0.0, 0.5))
@pytest.mark.parametrize("query", tuning.SIZES)
@pytest.mark.parametrize("key", (64, 256, 2048))
def test_search_finds_the_bottom_of_a_valley(query: int, key: int, tilt: float) -> None:
    race = Race(valley(query, key, tilt))
    start = Candidate(FLASH, eqxa.ChunkSizes(256, 256))
    assert found(race, GRID, start).sizes == (query, key)
    assert len(race.seconds) <= 18  # of 36


def test_candidates_are_timed_in_turn() -> None:
    order: list[Candidate] = []

    def seconds(candidate: Candidate) -> float:
        order.append(candidate)
        return float(len(order))

    first, second, third = GRID[:3]
    race = Race(seconds)
    ranked = race.run((first, second, third, first), 2)
    assert order == [first, second, third, second, third, first]
    assert ranked == [first, second, third]
    assert race.seconds == {first: [1, 6], second: [2, 4], third: [3, 5]}


def test_a_moment_of_noise_does_not_decide() -> None:
    """A candidate that was lucky once is timed again with the others."""
    lucky, good, slow = GRID[:3]
    times = {lucky: [0.5, *20 * [2.0]], good: 20 * [1.0], slow: 20 * [3.0]}
    race = Race(lambda candidate: times[candidate].pop(0))
    race.run((lucky, good, slow), 2)
    assert race.fastest()[0] == lucky
    assert decide(race, [slow], rounds=2)[0] == good


def test_a_candidate_that_fails_drops_out() -> None:
    def seconds(candidate: Candidate) -> float:
        if candidate.sizes == (256, 256):
            raise MemoryError("out of\nmemory")
        return valley(1024, 512)(candidate)

    race = Race(seconds)
    start = Candidate(FLASH, eqxa.ChunkSizes(256, 256))
    assert found(race, GRID, start).sizes == (1024, 512)
    assert race.failures == {start: "out of"}
    assert Race(lambda _: 1 / 0).run(GRID[:2], 2) == []


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="masks is no option of attention"):
        tuning.candidates(eqxa.Attention(), *arrays(), masks=None)


def test_default_chunk_sizes_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is one for all: it is in no cache, and no longer than the lengths."""
    assert tuning.default_chunk_sizes is eqxa.default_chunk_sizes
    monkeypatch.setattr("eqx_attention._config.on_cpu", lambda: False)
    assert tuning.default_chunk_sizes(4096, 4096) == eqxa.ChunkSizes(512, 1024)
    assert tuning.default_chunk_sizes(100, 0) == eqxa.ChunkSizes(100, 1)


def test_candidates_fit_the_lengths() -> None:
    def sizes(q_len: int, kv_len: int, backend: eqxa.Backend) -> list[Any]:
        query = jnp.zeros((1, q_len, 2, 4))
        key = jnp.zeros((1, kv_len, 2, 4))
        attend = eqxa.Attention(backend=backend)
        return [c.sizes for c in tuning.candidates(attend, query, key, key)]

    assert sizes(1, 100, FLASH) == [(1, 64), (1, 100)]
    assert sizes(1, 0, FLASH) == [(1, 1)]
    assert len(sizes(5000, 5000, FLASH)) == 36
    assert len(sizes(2048, 2048, FLASH)) == 36
    assert sizes(64, 64, eqxa.Backend.AUTO) == [(64, 64), None]
    assert None not in sizes(8192, 8192, eqxa.Backend.AUTO)  # too many logits at once


@pytest.mark.usefixtures("small_sizes")
def test_tune_keeps_what_it_finds(folder: Path) -> None:
    attend = eqxa.Attention(eqxa.AttentionConfig(causal=True))
    query, key, value = arrays()
    sinks, bias = jnp.zeros(1), jnp.zeros((16, 16))
    options = {"softmax_aux": sinks, "bias": bias}
    report = tuning.tune(attend, query, key, value, progress=False, **options)
    assert report.saved_to == folder / "tuned-v1.json"
    assert report.rule == Candidate(STANDARD)
    assert report.winner in report.seconds
    assert report.num_candidates == 6 and report.failures == {}
    assert report.speedup >= 1
    assert tuning.export() == report.entries

    choice = attend.resolve(query, key, value, **options)
    assert (choice.backend, choice.chunk_sizes) == (
        report.winner.backend,
        report.winner.chunk_sizes,
    )
    assert "tuned" in choice.reason
    flash = eqxa.resolve(query, key, value, backend=FLASH, causal=True, **options)
    best = min(
        (c for c in report.seconds if c.backend is FLASH),
        key=list(report.seconds).index,
    )
    assert (flash.chunk_sizes, flash.origin) == (best.chunk_sizes, "cached")
    assert "tuned" not in attend.resolve(query, key, value).reason
    text = str(report)
    for candidate in report.seconds:
        assert str(candidate) in text
    assert "winner" in text and "rule" in text and str(folder) in text

    # With these a call is as before, to rounding.
    out = attend(query, key, value, **options)
    tuning.clear()
    assert jnp.allclose(out, attend(query, key, value, **options), atol=1e-5)


@pytest.mark.usefixtures("small_sizes")
def test_all_candidates_that_are_given_are_timed(folder: Path) -> None:
    attend = eqxa.Attention(backend=FLASH)
    query, key, value = arrays()
    given = [Candidate(FLASH, eqxa.ChunkSizes(n, 16)) for n in (3, 5)]
    with tuning.overlay({}):
        report = tuning.tune(
            attend,
            query,
            key,
            value,
            candidates=given,
            gradient=False,
            progress=False,
            save=False,
        )
    assert report.seconds.keys() == {*given, report.rule}
    assert report.saved_to is None and list(folder.iterdir()) == []
    (entry_key,) = report.entries
    assert "flash" in entry_key and entry_key.endswith("forward")
    assert attend.resolve(query, key, value).origin == "rule"
    with tuning.overlay(report.entries):
        choice = attend.resolve(query, key, value)
    assert (choice.chunk_sizes, choice.origin) == (report.winner.chunk_sizes, "cached")


@pytest.mark.usefixtures("small_sizes")
def test_what_can_not_be_saved_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(cache, "save", full)
    given = [Candidate(STANDARD)]
    with pytest.warns(tuning.TuningCacheWarning, match="no space left"):
        report = tuning.tune(
            eqxa.Attention(), *arrays(), candidates=given, progress=False
        )
    assert report.saved_to is None and report.entries


WRAPPERS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "grad": jax.grad,
    "vmap": jax.vmap,
    "jit around": lambda function: jax.jit(lambda _: function(arrays()[0])),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_timed_while_tracing(wrapper: str) -> None:
    """Under jit there are no times, but of tracing."""
    query, key, value = arrays()
    if wrapper == "vmap":
        query = query[None]

    def tuned(query: Any) -> Any:
        tuning.tune(eqxa.Attention(), query, key, value)
        return jnp.zeros(())

    with pytest.raises(ValueError, match="while JAX traces"):
        WRAPPERS[wrapper](tuned)(query)


@pytest.mark.parametrize(
    ("attend", "options", "message"),
    (
        (
            eqxa.Attention(chunk_sizes=eqxa.ChunkSizes(4, 4)),
            {},
            "attention has ChunkSizes",
        ),
        (eqxa.Attention(backend=STANDARD), {}, "no chunks to tune"),
        (eqxa.Attention(backend=eqxa.Backend.CUDNN), {}, "backend is CUDNN, but"),
        (eqxa.Attention(), {"sequence_end": jnp.asarray([3])}, "decoding"),
        (eqxa.Attention(backend=eqxa.Backend.RAGGED_DECODE), {}, "decoding"),
        (eqxa.Attention(), {"rounds": 0}, "rounds is 0"),
        (eqxa.Attention(), {"candidates": []}, "candidates is empty"),
    ),
)
def test_what_can_not_be_tuned(attend: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tuning.tune(attend, *arrays(), **options)


def test_if_nothing_runs_the_reason_is_told() -> None:
    """The mask does not fit, which a call says."""
    with pytest.raises(RuntimeError, match=r"no candidate could run.*mask has shape"):
        tuning.tune(
            eqxa.Attention(),
            *arrays(),
            mask=jnp.ones((3, 3), bool),
            candidates=[Candidate(STANDARD)],
            progress=False,
        )


def test_tools_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are an error where they are asked for, and nowhere else."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(_tuning_timer, "SAMPLE_SECONDS", 1e-9)
    call = {"candidates": [Candidate(STANDARD)], "gradient": False, "save": False}
    with pytest.raises(ImportError, match="progress needs tqdm: pip install"):
        tuning.tune(eqxa.Attention(), *arrays(), progress=True, **call)
    report = tuning.tune(eqxa.Attention(), *arrays(), **call)
    with pytest.raises(ImportError, match="plot needs matplotlib: pip install"):
        report.plot()


def test_bar_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_sizes: None
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    given = [Candidate(FLASH, eqxa.ChunkSizes(4, n)) for n in (4, 8)]
    report = tuning.tune(
        eqxa.Attention(), *arrays(), candidates=given, gradient=False, progress=True
    )
    assert "timings" in capsys.readouterr().err
    figure = report.plot(tmp_path / "map.png")
    assert [axes.get_title() for axes in figure.axes] == ["FLASH", ""]
    assert (tmp_path / "map.png").stat().st_size > 1000
