"""Stubs say what the compiled module has, and everything public is documented."""

from __future__ import annotations

import ast
import inspect
import pathlib

import moe4
from moe4 import _moe4


def stubs() -> dict[str, list[str]]:
    """Names of the stub file's functions, with their parameters."""
    path = pathlib.Path(moe4.__file__).with_name("_moe4.pyi")
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name: [a.arg for a in [*f.args.args, *f.args.kwonlyargs]] for f in functions}


def test_stubs_agree_with_the_module() -> None:
    found = {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(_moe4).items()
        if callable(value) and not name.startswith("__")
    }
    assert stubs() == found
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


def test_the_readme_runs() -> None:
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    blocks = readme.read_text().split("```python\n")[1:]
    assert blocks
    for block in blocks:
        exec(block.split("```")[0], {"__name__": "readme"})
