"""What the README shows is what happens."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(found[1], found[2]) for found in BLOCK.finditer(README)]
# A block that begins with its file's name is a program, and ends in an error.
PROGRAM = re.compile(r"# (\w+\.py)\n")
EXAMPLES = [
    code for kind, code in BLOCKS if kind == "python" and not PROGRAM.match(code)
]


def programs() -> dict[str, tuple[str, str]]:
    """The code of each program by its name, and the text that the README shows."""
    found: dict[str, tuple[str, str]] = {}
    for (kind, code), (next_kind, text) in itertools.pairwise(BLOCKS):
        name = PROGRAM.match(code)
        if kind == "python" and name:
            assert next_kind == "text", f"{name[1]} is shown without what it prints"
            found[name[1]] = code, text
    return found


PROGRAMS = programs()


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Compiling is most of what the examples cost."""
    name = "jax_disable_most_optimizations"
    jax.config.update(name, True)  # pyright: ignore[reportUnknownMemberType]  # has no types
    yield
    jax.config.update(name, False)  # pyright: ignore[reportUnknownMemberType]  # has no types


@pytest.mark.usefixtures("quick_compiler")
def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, in their order; and what they print stands in a comment."""
    assert len(EXAMPLES) >= 9
    names: dict[str, Any] = {"__name__": "readme"}
    for number, code in enumerate(EXAMPLES):
        exec(compile(code, f"README.md, example {number}", "exec"), names)
        for line in capsys.readouterr().out.splitlines():
            assert f"# {line}\n" in code


def essential(text: str) -> list[str]:
    """Lines, in which the module that JAX keeps its arrays in has no part."""
    lines = [re.sub(r"[\w.]+\.Array\b", "Array", x).strip() for x in text.splitlines()]
    return [line for line in lines if line and line != "..."]


@pytest.mark.parametrize("name", PROGRAMS)
def test_errors_are_as_shown(name: str, tmp_path: Path) -> None:
    """In the debugging mode, each line that is shown is printed, and in that order."""
    code, shown = PROGRAMS[name]
    (tmp_path / name).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", name],
        cwd=tmp_path,
        env=os.environ | {"EQX_ATTENTION_DEBUG": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    printed = iter(essential(done.stderr))
    for line in essential(shown):
        assert line in printed, f"{line!r} is missing, or out of order"


def test_links() -> None:
    """Files that the README points to are there."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
