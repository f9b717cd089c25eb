"""Importing the package leaves no trace: nothing in HOME, no JAX backend started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(code: str, home: Path, debug: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` where any start of a JAX backend is an error."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "JAX_"))}
    return subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code],
        cwd=ROOT,
        env=kept
        | {
            "EQX_ATTENTION_DEBUG": debug,
            "HOME": str(home),
            "JAX_PLATFORMS": "no_such_platform",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("debug", ["0", "1"])
def test_import_leaves_no_trace(tmp_path: Path, debug: str) -> None:
    done = run("import eqx_attention", tmp_path, debug)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_started_backend_is_seen(tmp_path: Path) -> None:
    done = run("import jax; jax.numpy.zeros(1)", tmp_path, "0")
    assert "no_such_platform" in done.stderr
    assert done.returncode != 0
