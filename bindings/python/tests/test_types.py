"""Stubs say what the compiled module has, and everything public is documented."""

from __future__ import annotations

import ast
import inspect
import pathlib

import moe4
import pytest
from moe4 import _moe4


def stubs() -> dict[str, list[str]]:
    """Names of the stub file's functions and methods, with their parameters."""
    path = pathlib.Path(moe4.__file__).with_name("_moe4.pyi")
    functions = {}
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        functions.update({prefix + f.name: f for f in members if isinstance(f, ast.FunctionDef)})
    return {name: [a.arg for a in [*f.args.args, *f.args.kwonlyargs]] for name, f in functions.items()}


def test_stubs_agree_with_the_module() -> None:
    found = {}
    for name, value in vars(_moe4).items():
        is_class = inspect.isclass(value)
        members = {f"{name}.{key}": member for key, member in vars(value).items()} if is_class else {name: value}
        found.update({key: member for key, member in members.items() if callable(member) and "__" not in key})
    assert stubs() == {name: list(inspect.signature(value).parameters) for name, value in found.items()}
    assert isinstance(_moe4.__version__, str) and moe4.__version__ == _moe4.__version__
    assert pathlib.Path(moe4.__file__).with_name("py.typed").exists()


def test_everything_public_is_documented() -> None:
    for name in moe4.__all__:
        value = getattr(moe4, name)
        if callable(value):
            assert inspect.getdoc(value), name
            members = vars(value).items() if inspect.isclass(value) else ()
            for member, function in members:
                if inspect.isfunction(function) and not member.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{member}"


@pytest.mark.parametrize("folder", ["bindings/python", "."])
def test_the_readme_runs(folder: str) -> None:
    readme = pathlib.Path(__file__).parents[3] / folder / "README.md"
    blocks = readme.read_text().split("```python\n")[1:]
    assert blocks
    for block in blocks:
        exec(block.split("```")[0], {"__name__": "readme"})
