"""What tuning found, on disk: it comes back, and no file can do harm."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqx_attention as eqxa
from eqx_attention import _tuning_cache as cache, tuning
from eqx_attention._request import Request
from eqx_attention.tuning import Entry, TuningCacheWarning

from .helpers import qkv
from .test_import import ROOT

LONG = jax.ShapeDtypeStruct((1, 1000, 4, 8), jnp.float32)
GOOD = Entry("flash", 40, 50, 0.5)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is; it isn't made yet."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_tables", {})
    return tmp_path / "cache"


def forget() -> None:
    """As in a new process."""
    cache._tables.clear()


def key_of(backend: str = "flash", timed: Any = "gradient", **options: Any) -> str:
    return Request.of(LONG, LONG, **options).tuning_key(backend, timed)


def sizes(**options: Any) -> tuple[eqxa.ChunkSizes | None, str | None]:
    choice = eqxa.resolve(LONG, LONG, **options)
    return choice.chunk_sizes, choice.origin


def found(entry: Entry) -> tuple[eqxa.ChunkSizes, str]:
    assert entry.query_chunk is not None and entry.key_chunk is not None
    return eqxa.ChunkSizes(entry.query_chunk, entry.key_chunk), "cached"


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in (folder.iterdir() if folder.exists() else ())
    }


def test_what_is_saved_is_found_again(folder: Path) -> None:
    rule = sizes()
    assert rule == (eqxa.default_chunk_sizes(1000, 1000), "rule")
    assert cache.save({key_of(): GOOD}) == folder / "tuned-v1.json"
    assert sizes() == found(GOOD)
    forget()
    assert sizes() == found(GOOD)
    assert sizes(causal=True) == rule
    tuning.clear()
    assert sizes() == rule
    forget()
    assert sizes() == rule


def test_explicit_sizes_win_and_are_not_kept(folder: Path) -> None:
    cache.save({key_of(): GOOD})
    before = listing(folder)
    explicit = eqxa.ChunkSizes(7, 9)
    assert sizes(chunk_sizes=explicit) == (explicit, "explicit")
    arrays = qkv(batch=(1,), q_len=1000, kv_len=1000, kv_heads=4, qk_dim=8, v_dim=8)
    query, key, value = (jnp.asarray(x) for x in arrays.values())
    eqxa.attention(query, key, value, chunk_sizes=eqxa.ChunkSizes(500, 500))
    assert sizes() == found(GOOD)
    assert listing(folder) == before


def test_looking_up_writes_nothing(folder: Path) -> None:
    sizes()
    assert not folder.exists()
    cache.save({key_of(): GOOD})
    forget()
    before = listing(folder)
    folder.chmod(0o500)
    try:
        attend = eqxa.Attention()
        query = jnp.ones(LONG.shape)

        def lowered(attend: eqxa.Attention) -> str:
            return jax.jit(lambda x: attend(x, x, x)).lower(query).as_text()

        by_cache = lowered(attend)
    finally:
        folder.chmod(0o700)
    assert listing(folder) == before
    explicit = eqxa.Attention(chunk_sizes=eqxa.ChunkSizes(40, 50))
    assert by_cache == lowered(explicit)
    with tuning.overlay({key_of(): Entry("flash", 60, 50, 0.5)}):
        assert by_cache != lowered(attend)


BAD = {
    "truncated": b'{"schema": 1, "entries": {"a": {"backend": "fla',
    "empty": b"",
    "binary": b"\xff\xfe\x00\x01",
    "list": b"[1, 2]",
    "foreign": b'{"name": "other", "version": 3}',
    "old": b'{"schema": 0, "entries": {}}',
    "new": b'{"schema": 2, "entries": {}}',
    "no entries": b'{"schema": 1, "entries": 3}',
    "fields": b'{"schema": 1, "entries": {"a": {"backend": "flash"}}}',
    "numbers": b'{"schema": 1, "entries": {"a": {"backend": "flash", "query_chunk": 0, '
    b'"key_chunk": 1, "seconds": 1}}}',
    "infinite": b'{"schema": 1, "entries": {"a": {"backend": "flash", "query_chunk": 1,'
    b' "key_chunk": 1, "seconds": Infinity}}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_file_is_set_aside_and_never_fatal(folder: Path, content: bytes) -> None:
    folder.mkdir()
    path = folder / "tuned-v1.json"
    path.write_bytes(content)
    with pytest.warns(TuningCacheWarning, match="tuned-v1.json is no table"):
        assert sizes() == (eqxa.default_chunk_sizes(1000, 1000), "rule")
    assert path.read_bytes() == content  # looking writes nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes()  # and tells once
    with pytest.warns(TuningCacheWarning, match="it is now tuned-v1.json.set-aside-1"):
        cache.save({key_of(): GOOD})
    assert (folder / "tuned-v1.json.set-aside-1").read_bytes() == content
    forget()
    assert sizes() == found(GOOD)
    path.write_bytes(content)
    with pytest.warns(TuningCacheWarning, match="set-aside-2"):
        tuning.clear()


def test_a_bad_file_does_not_matter_to_an_import(folder: Path) -> None:
    folder.mkdir()
    (folder / "tuned-v1.json").write_bytes(BAD["truncated"])
    before = listing(folder)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import eqx_attention.tuning"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert listing(folder) == before


WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = sys.modules["cache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
assert "jax" not in sys.modules
for number in range(10):
    cache.save({f"{sys.argv[2]}-{number}": cache.Entry("flash", 1 + number, 2, 0.5)})
"""


def test_many_processes_lose_nothing(folder: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(cache.__file__), str(number)]
        )
        for number in range(8)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == 8 * [0]
    table = cache.read(folder / "tuned-v1.json")
    assert {key: entry.query_chunk for key, entry in table.items()} == {
        f"{writer}-{number}": 1 + number for writer in range(8) for number in range(10)
    }
    left = {path.name for path in folder.iterdir()}
    assert left <= {"tuned-v1.json", "tuned-v1.json.lock"}


def test_a_write_that_fails_leaves_what_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.save({key_of(): GOOD})
    before = listing(folder)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            cache.save({key_of(causal=True): GOOD})
    assert listing(folder) == before
    assert sizes(causal=True)[1] == "rule"


@pytest.mark.parametrize("off", ("", "off"))
def test_it_can_be_turned_off(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.save({key_of(): GOOD})
    monkeypatch.setenv(cache.VARIABLE, off)
    assert sizes()[1] == "rule"
    assert cache.cache_path() is None
    assert cache.save({key_of(): GOOD}) is None
    assert tuning.export() == {}
    tuning.clear()
    with pytest.raises(ValueError, match="EQX_ATTENTION_CACHE_DIR"):
        tuning.load({key_of(): GOOD})


def test_by_default_it_is_in_the_cache_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = cache.cache_path()
    assert path is not None and path.parent.name == "eqx_attention"
    if sys.platform == "linux":
        assert path.parent.parent == tmp_path / "xdg"
        assert not path.parent.parent.exists()


def test_export_and_load(folder: Path, tmp_path: Path) -> None:
    cache.save({key_of(): GOOD})
    shipped = tmp_path / "shipped.json"
    assert tuning.export(shipped) == {key_of(): GOOD}
    tuning.clear()
    assert tuning.export() == {}
    with tuning.overlay(shipped):
        assert sizes() == found(GOOD)
    assert sizes()[1] == "rule"
    tuning.load(shipped)
    assert sizes() == found(GOOD)
    shipped.write_text("{}")
    for use in (tuning.load, lambda path: tuning.overlay(path).__enter__()):
        with pytest.raises(ValueError, match=r"shipped\.json is no table"):
            use(shipped)


def test_which_entry_counts() -> None:
    """The innermost overlay, then the file; in each, first the gradient."""

    def entry(size: int) -> Entry:
        return Entry("flash", size, 50, 0.5)

    cache.save({key_of(timed="forward"): entry(1)})
    assert sizes() == found(entry(1))
    cache.save({key_of(): entry(2)})
    assert sizes() == found(entry(2))
    with tuning.overlay({key_of(timed="forward"): entry(3)}):
        assert sizes() == found(entry(3))
        with tuning.overlay({"another": entry(4)}):
            assert sizes() == found(entry(3))
            with tuning.overlay({key_of(): entry(5)}):
                assert sizes() == found(entry(5))
    assert sizes() == found(entry(2))


def test_tuned_backends() -> None:
    key = key_of("auto")
    for backend, expected in (
        ("standard", eqxa.Backend.STANDARD),
        ("cudnn", eqxa.Backend.FLASH),  # which is not here
        ("auto", eqxa.Backend.FLASH),
        ("ragged_decode", eqxa.Backend.FLASH),
        ("from another version", eqxa.Backend.FLASH),
    ):
        with tuning.overlay({key: Entry(backend, None, None, 0.5)}):
            choice = eqxa.resolve(LONG, LONG)
        assert choice.backend is expected, backend
    assert "tuned" not in choice.reason
    # In the same bucket of lengths, more logits than are made at once unasked.
    many = jax.ShapeDtypeStruct((4096, 1000, 4, 8), jnp.float32)
    with tuning.overlay({key: Entry("standard", None, None, 0.5)}):
        assert eqxa.resolve(many, many).backend is eqxa.Backend.FLASH
        assert "tuned" in eqxa.resolve(LONG, LONG).reason


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "versions": lambda m: m.setattr(
        "eqx_attention._request.versions", lambda: ("jax 0.1",)
    ),
    "device": lambda m: m.setattr(
        "eqx_attention._request.device_kind", lambda: "another"
    ),
    "processes": lambda m: m.setattr(jax, "process_count", lambda: 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_found_elsewhere_does_not_count(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.save({key_of(): GOOD})
    entries = {key_of(): GOOD}
    CHANGES[change](monkeypatch)
    assert sizes()[1] == "rule"
    with tuning.overlay(entries):  # several processes can be given the same table
        assert (sizes()[1] == "cached") is (change == "processes")


def test_keys() -> None:
    """Lengths up to the next power of two share a key; all else tells calls apart."""
    spec = jax.ShapeDtypeStruct

    def key(x: Any, kv: Any = None, backend: str = "flash", **options: Any) -> str:
        return Request.of(x, x if kv is None else kv, **options).tuning_key(
            backend, "gradient"
        )

    base = key(LONG)
    assert base == key(spec((8, 1024, 4, 8), jnp.float32))
    assert base == key(spec((513, 4, 8), jnp.float32))
    assert base == key(LONG, sliding_window=(None, None), dropout_prob=0.0)
    window = key(LONG, sliding_window=(100, 0))
    assert window == key(LONG, sliding_window=(128, 0))
    ids = jnp.zeros((1, 1000), jnp.int32)
    others = [
        window,
        key(spec((1, 1025, 4, 8), jnp.float32)),
        key(spec((1, 512, 4, 8), jnp.float32)),
        key(LONG, spec((1, 2000, 4, 8), jnp.float32)),
        key(LONG, spec((1, 1000, 2, 8), jnp.float32)),
        key(spec((1, 1000, 4, 16), jnp.float32)),
        key(spec((1, 1000, 4, 8), jnp.bfloat16)),
        key(LONG, causal=True),
        key(LONG, sliding_window=(129, 0)),
        key(LONG, q_segment_ids=ids),
        key(LONG, dropout_prob=0.5),
        key(LONG, logits_soft_cap=3.0),
        key(LONG, backend="splash"),
        Request.of(LONG, LONG).tuning_key("flash", "forward"),
    ]
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "fields",
    (
        ("flash", 0, 1, 0.5),
        ("flash", 1, None, 0.5),
        ("flash", 1, 1, -1.0),
        ("flash", 1, 1, float("nan")),
    ),
)
def test_no_entry_is_made_of_nonsense(fields: Any) -> None:
    with pytest.raises(ValueError, match="no result of tuning"):
        Entry(*fields)


def test_the_file_is_plain(folder: Path) -> None:
    cache.save({"a": GOOD})
    assert json.loads((folder / "tuned-v1.json").read_text()) == {
        "schema": 1,
        "entries": {
            "a": {
                "backend": "flash",
                "query_chunk": 40,
                "key_chunk": 50,
                "seconds": 0.5,
            }
        },
    }
