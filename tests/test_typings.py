"""The stubs in `typings/` say nothing that the installed packages do not have."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TYPINGS = Path(__file__).parent.parent / "typings"
STUBS = sorted(TYPINGS.rglob("*.pyi"))


def module_name(stub: Path) -> str:
    """`typings/a/b/__init__.pyi` stands for `a.b`."""
    parts = stub.relative_to(TYPINGS).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def declared(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The public names that the statements of a stub declare or re-export."""
    for node in body:
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                # In a stub, only `import x as x` and `import y as x` re-export.
                found = [alias.asname for alias in names if alias.asname]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found = [name]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found = [name]
            case ast.Assign(targets=[ast.Name(id=name)]):
                found = [name]
            case _:
                found = []
        yield from ((name, node) for name in found if not name.startswith("_"))


def check_signature(name: str, stub: ast.FunctionDef, function: Any) -> None:
    """Asserts that the function takes every argument that its stub names."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    named = {a.arg for a in (*stub.args.args, *stub.args.kwonlyargs)}
    assert named <= set(parameters), name


@pytest.mark.parametrize("stub", STUBS, ids=module_name)
def test_names_exist(stub: Path) -> None:
    module = importlib.import_module(module_name(stub))
    names = list(declared(ast.parse(stub.read_text()).body))
    assert names
    for name, node in names:
        assert hasattr(module, name), name
        value = getattr(module, name)
        if isinstance(node, ast.FunctionDef):
            check_signature(name, node, value)
        if isinstance(node, ast.ClassDef):
            for member, _ in declared(node.body):
                assert hasattr(value, member), f"{name}.{member}"


def test_a_missing_name_is_seen() -> None:
    body = ast.parse(
        "from a import b as b, c\nclass D:\n    e: int\ndef f(g): ..."
    ).body
    assert [name for name, _ in declared(body)] == ["b", "D", "f"]
    *_, (_, function) = declared(body)
    assert isinstance(function, ast.FunctionDef)
    with pytest.raises(AssertionError, match="f"):
        check_signature("f", function, module_name)
