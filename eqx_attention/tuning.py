"""Chunk sizes, and backends, that were measured: asked for, and kept.

Nothing is tuned unless [`eqx_attention.tuning.tune`][] is called. What it finds is kept
in one JSON file of the user's cache folder, or of the folder that the environment
variable `EQX_ATTENTION_CACHE_DIR` names; if that is empty or "off", nowhere. Calls of
[`eqx_attention.attention`][] and [`eqx_attention.Attention`][] that are given no chunk
sizes take what was found for the same kind of device, versions, shapes (rounded up to
powers of two) and options. What is compiled already stays as it is, and a program of
several processes reads no file, so that all compile the same: give it an `overlay`.
"""

import contextlib
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import _tuning_cache as cache
from ._attention import Attention, call_options
from ._backend import (
    KERNELS,
    STANDARD_LOGITS,
    Backend,
    by_rule,
    rule_chunk_sizes,
    why_not,
)
from ._config import ChunkSizes, default_chunk_sizes as default_chunk_sizes
from ._jax import is_traced
from ._request import Request
from ._tuning_cache import Entry as Entry, TuningCacheWarning as TuningCacheWarning
from ._tuning_report import TuningReport as TuningReport
from ._tuning_search import Candidate as Candidate, Race, decide, explore
from ._tuning_timer import Timer
from ._typing import Key, Query, Value, checked

SIZES = (64, 128, 256, 512, 1024, 2048)


@checked
def candidates(
    attention: Attention, query: Query, key: Key, value: Value, **options: Any
) -> tuple[Candidate, ...]:
    """What [`eqx_attention.tuning.tune`][] chooses from for these arguments.

    Chunks of 64 to 2048 queries and as many keys, no longer than the lengths. If the
    backend of `attention` is AUTO, for each backend that can do here what is asked; the
    whole matrix at once only up to 2**26 logits.
    """
    request = _request(attention, query, key, value, options)
    return tuple(
        candidate
        for backend in _backends(attention, request)
        for candidate in _candidates_of(backend, request)
    )


@checked
def tune(
    attention: Attention,
    query: Query,
    key: Key,
    value: Value,
    *,
    gradient: bool = True,
    candidates: Sequence[Candidate] | None = None,
    rounds: int = 3,
    save: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> TuningReport:
    """Times chunk sizes, and backends, for a call, and keeps what is fastest.

    Candidates are compiled, and timed in turn on the arrays given: first the sizes of
    the default rule, then what is near them on the grid, as long as that is faster
    (`_tuning_search.py` tells more). The fastest few are timed again to the end.

    **Arguments:**

    - `attention`: what to tune. If its backend is AUTO, backends are compared too.
    - `query`, `key`, `value`, `options`: of a call of `attention`. Their numbers do not
        matter unless they mask.
    - `gradient`: whether to time the gradient with the output, as in training. What was
        tuned so comes first in every call, as a call can't see if it is differentiated.
    - `candidates`: all of these are timed. By default the search picks its own from
        [`eqx_attention.tuning.candidates`][], about a third of them.
    - `rounds`: at the least, of timing the finalists in turn.
    - `save`: whether to keep what is found in the cache.
    - `progress`: whether to show a bar; by default if tqdm is installed.

    **Returns:** a [`eqx_attention.tuning.TuningReport`][].

    **Raises:** `ValueError` while something is traced, as there is nothing to time
    then; or if there is nothing to choose. `RuntimeError` if no candidate can run.
    """
    traced = jax.tree.leaves((query, key, value, options))
    if any(is_traced(x) for x in traced) or is_traced(jnp.zeros(())):
        raise ValueError(
            "tune is called while JAX traces, as under jit, grad or vmap, and nothing "
            "can be timed there: call it before, and what is traced later finds it"
        )
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, but must be at least 1")
    request = _request(attention, query, key, value, options)
    backends = _backends(attention, request)
    given = candidates
    if candidates is None:
        candidates = [c for b in backends for c in _candidates_of(b, request)]
    if not candidates:
        raise ValueError("candidates is empty, but there must be something to time")
    arguments = {"query": query, "key": key, "value": value, **options}
    rule = _rule(attention, request)
    # Of each backend the search starts from what its own rule says.
    used = dict.fromkeys((rule.backend, *(c.backend for c in candidates)))
    starts = [Candidate(b, rule_chunk_sizes(b, request)) for b in used]
    with _bar(progress) as say:
        race = Race(Timer(attention, arguments, gradient, say))
        if given is None:
            explore(race, candidates, starts)
        else:
            race.run((*starts, *candidates), 2)
        ranked = decide(race, starts, rounds)
    if not ranked:
        candidate, reason = next(iter(race.failures.items()))
        raise RuntimeError(f"no candidate could run: {candidate}: {reason}")
    others = [c for c in race.fastest() if c not in ranked]
    last = {c: min(race.seconds[c][-rounds:]) for c in (ranked[0], rule) if c in ranked}
    entries = _entries(attention.backend, request, race, ranked, gradient)
    return TuningReport(
        ranked[0],
        rule,
        {c: tuple(race.seconds[c]) for c in (*ranked, *others)},
        last.get(rule, math.nan) / last[ranked[0]],
        race.failures,
        len({*candidates, *starts}),
        entries,
        _save(entries) if save else None,
    )


@contextlib.contextmanager
def overlay(table: Mapping[str, Entry] | str | Path) -> Generator[None]:
    """Within it, tuned entries of `table` come before those of the cache.

    **Arguments:** `table`: `TuningReport.entries`, or what `export` returned or wrote:
    a model may bring a table that it was tuned with, and a test its own.

    **Raises:** as [`eqx_attention.tuning.load`][].
    """
    with cache.overlay(_table(table)):
        yield


def export(path: str | Path | None = None) -> dict[str, Entry]:
    """All entries of the cache, by key; also written to a file, if `path` is given."""
    table = dict(cache.table_of_file())
    if path is not None:
        cache.write(Path(path), table)
    return table


def load(table: Mapping[str, Entry] | str | Path) -> None:
    """Adds the entries of a table to the cache; of one key, what is loaded counts.

    **Raises:** `ValueError` if a file holds no such table, or the cache is turned off;
    `OSError` if a file can't be read or written.
    """
    if cache.save(_table(table)) is None:
        raise ValueError(
            f"the cache is turned off by {cache.VARIABLE}, so nothing can be loaded"
        )


def clear() -> None:
    """Removes all entries from the cache."""
    cache.clear()


def _request(
    attention: Attention, query: Any, key: Any, value: Any, options: dict[str, Any]
) -> Request:
    if attention.chunk_sizes is not None:
        raise ValueError(
            f"attention has {attention.chunk_sizes}, which win over all that is tuned: "
            "leave them out to tune it"
        )
    if "sequence_end" in options or attention.backend is Backend.RAGGED_DECODE:
        raise ValueError("sequence_end is given, but decoding is not tuned")
    return Request.of(query, key, value, **call_options(attention, **options))


def _backends(attention: Attention, request: Request) -> list[Backend]:
    if attention.backend is not Backend.AUTO:
        refusal = why_not(attention.backend, request)
        if refusal is not None:
            raise ValueError(f"backend is {attention.backend.name}, but {refusal}")
        if rule_chunk_sizes(attention.backend, request) is None:
            raise ValueError(
                f"backend is {attention.backend.name}, which has no chunks to tune"
            )
        return [attention.backend]
    able = [backend for backend in KERNELS if why_not(backend, request) is None]
    fits = request.num_logits <= STANDARD_LOGITS
    return [Backend.FLASH, *([Backend.STANDARD] if fits else []), *able]


def _candidates_of(backend: Backend, request: Request) -> list[Candidate]:
    rule = rule_chunk_sizes(backend, request)
    if rule is None:
        return [Candidate(backend)]
    found: list[Candidate] = []
    for query, key in itertools.product(_sizes(request.q_len), _sizes(request.kv_len)):
        sizes = ChunkSizes(query, key)
        if why_not(backend, request.with_sizes(sizes)) is None:
            found.append(Candidate(backend, sizes))
    return found


def _sizes(length: int) -> list[int]:
    """Those below the length, and the length itself if it is not above them all."""
    below = [size for size in SIZES if size < length]
    return below if length > SIZES[-1] else [*below, max(length, 1)]


def _rule(attention: Attention, request: Request) -> Candidate:
    """What is taken where nothing is tuned."""
    backend = attention.backend
    if backend is Backend.AUTO:
        backend = by_rule(request).backend
    return Candidate(backend, rule_chunk_sizes(backend, request))


def _entries(
    backend: Backend,
    request: Request,
    race: Race,
    ranked: Sequence[Candidate],
    gradient: bool,
) -> dict[str, Entry]:
    """The winner, for the backend that was asked for; and the best of each backend."""
    best = {backend: ranked[0]}
    for candidate in ranked:
        best.setdefault(candidate.backend, candidate)
    found: dict[str, Entry] = {}
    for backend, candidate in best.items():
        if candidate.chunk_sizes is not None or backend is Backend.AUTO:
            key = request.tuning_key(
                backend.value, "gradient" if gradient else "forward"
            )
            query, key_size = candidate.sizes or (None, None)
            seconds = min(race.seconds[candidate])
            found[key] = Entry(candidate.backend.value, query, key_size, seconds)
    return found


def _save(entries: Mapping[str, Entry]) -> Path | None:
    """Where they are kept. What was found is not lost if they can't be."""
    try:
        return cache.save(entries)
    except OSError as error:
        warnings.warn(
            f"what was tuned is not saved: {error!r}", TuningCacheWarning, stacklevel=3
        )
        return None


def _table(table: Mapping[str, Entry] | str | Path) -> Mapping[str, Entry]:
    return cache.read(Path(table)) if isinstance(table, str | Path) else table


@contextlib.contextmanager
def _bar(progress: bool | None) -> Generator[Callable[[str], None]]:
    """Counts the timings, and tells of which candidate the current one is."""
    try:
        if progress is False:
            raise ImportError
        bars: Any = importlib.import_module("tqdm")
    except ImportError as error:
        if progress:
            raise ImportError("progress needs tqdm: pip install tqdm") from error
        yield lambda _: None
        return
    with bars.tqdm(unit=" timings") as bar:

        def say(candidate: str) -> None:
            bar.set_postfix_str(candidate)
            bar.update()

        yield say
