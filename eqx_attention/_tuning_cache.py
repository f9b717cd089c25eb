"""What tuning found, kept in one file of the user's cache folder.

Plain names and numbers only: this file needs neither JAX nor the rest of the package.

Looking something up never writes: a file that is no such table counts as empty, with a
warning, and is set aside when something is next written. It is read once, when first
looked at, and again when this process writes: what other processes find in the meantime
does not change how this one computes.
"""

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import platformdirs
from filelock import FileLock

SCHEMA = 1
"""Of the file. It is in its name too: versions of this package do not quarrel."""
VARIABLE = "EQX_ATTENTION_CACHE_DIR"
LOCK_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was found best: a backend by its value, its chunks if it has any, a time."""

    backend: str
    query_chunk: int | None
    key_chunk: int | None
    seconds: float

    def __post_init__(self) -> None:
        chunks = (self.query_chunk, self.key_chunk)
        right = (
            type(self.backend) is str
            and (
                chunks == (None, None) or all(type(c) is int and c > 0 for c in chunks)
            )
            and type(self.seconds) in (int, float)
            and 0 <= self.seconds < math.inf
        )
        if not right:
            raise ValueError(f"{self} is no result of tuning")


Table: TypeAlias = Mapping[str, Entry]
"""Entries by key, which is text that says for what and where they were found."""


class TuningCacheWarning(UserWarning):
    """The cache can't be read, or not be written. What it holds is not used."""


_overlays: ContextVar[tuple[Table, ...]] = ContextVar("overlays", default=())
_tables: dict[Path, Table] = {}


def cache_path() -> Path | None:
    """The file, which need not exist; None if the cache is turned off."""
    folder = os.environ.get(VARIABLE)
    if folder in ("", "off"):
        return None
    if folder is None:
        folder = platformdirs.user_cache_dir("eqx_attention", appauthor=False)
    return Path(folder) / f"tuned-v{SCHEMA}.json"


def tables(*, with_file: bool = True) -> tuple[Table, ...]:
    """Those that have entries, the one that counts first: overlays, then the file."""
    found = reversed(_overlays.get())
    if with_file:
        found = (*found, table_of_file())
    return tuple(table for table in found if table)


def table_of_file() -> Table:
    """What the file held when this process first looked, or last wrote."""
    path = cache_path()
    if path is None:
        return {}
    if path not in _tables:
        _tables[path] = {}  # if the warning is an error, it is one once
        try:
            _tables[path] = read(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            warnings.warn(
                f"tuned chunk sizes are not used: {error}. When something is next "
                "tuned, the file is set aside",
                TuningCacheWarning,
                stacklevel=2,
            )
    return _tables[path]


def save(entries: Table) -> Path | None:
    """Adds entries to the file, and says where it is; None if there is no cache.

    **Raises:** `OSError` if it can't be written, or is locked for a minute.
    """
    path = cache_path()
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return _rewrite(path, lambda table: {**table, **entries})


def clear() -> None:
    """Removes all entries from the file."""
    path = cache_path()
    if path is not None and path.exists():
        _rewrite(path, lambda _: {})


@contextlib.contextmanager
def overlay(table: Table) -> Generator[None]:
    """Within it, entries of `table` come before those of the file."""
    token = _overlays.set((*_overlays.get(), table))
    try:
        yield
    finally:
        _overlays.reset(token)


def read(path: Path) -> Table:
    """The entries of a file.

    **Raises:** `ValueError` for one that is no such table; `OSError` if it can't be
    read.
    """
    try:
        found: Any = json.loads(path.read_bytes())
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']}, and not {SCHEMA}")
        return {str(k): Entry(**fields) for k, fields in found["entries"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no table of tuned sizes ({error!r})") from error


def write(path: Path, table: Table) -> None:
    """Writes a file at once: whoever reads sees the old one or the new one."""
    entries = {key: dataclasses.asdict(entry) for key, entry in sorted(table.items())}
    text = json.dumps({"schema": SCHEMA, "entries": entries}, indent=1)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _rewrite(path: Path, change: Callable[[Table], Table]) -> Path:
    """Reads, changes and writes the file while nobody else does."""
    with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
        table: Table = {}
        try:
            table = read(path)
        except FileNotFoundError:
            pass
        except ValueError as error:
            aside = _free_name(path)
            os.replace(path, aside)
            warnings.warn(
                f"{error}: it is now {aside.name}", TuningCacheWarning, stacklevel=3
            )
        table = change(table)
        write(path, table)
    _tables[path] = table
    return path


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    return aside
