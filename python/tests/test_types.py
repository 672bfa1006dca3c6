"""The stub of the binding has the names that the binding has, the types of the package agree, and all public names are
explained. One rank; no launcher."""

import ast
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import lockstep
from lockstep import _C

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
SHARED_WITH_ALL_CLASSES = set(dir(object)) | {"__module__", "__dict__", "__weakref__", "__annotations__"}


def names_of_stub():
    """Returns the stub's functions and classes, and the members of each class."""
    found = {}
    for node in ast.parse((PACKAGE / "lockstep/_C.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
            members += [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            found[node.name] = set(members) - {"__init__"}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, ast.Assign) and node.targets[0].id != "NamedTensors":
            found[node.targets[0].id] = None
    return found


def names_of_binding():
    found = {}
    for name, value in vars(_C).items():
        if name.startswith("__"):
            continue
        found[name] = None
        if inspect.isclass(value):
            inherited = {
                member for base in value.__bases__ for member in dir(base)
            }  # such as those of a class of torch
            members = set(dir(value)) - SHARED_WITH_ALL_CLASSES - inherited
            is_enum = hasattr(value, "__members__")
            found[name] = {one for one in members if not one.startswith("_")} | (
                {"name", "value"} if is_enum else set()
            )
    return found


def test_stub_has_the_names_of_the_binding():
    stub, binding = names_of_stub(), names_of_binding()
    assert sorted(stub) == sorted(binding)
    for name, members in binding.items():
        assert (sorted(stub[name]) if members is not None else None) == (
            sorted(members) if members is not None else None
        ), name


def test_types_agree():
    pytest.importorskip("mypy", reason="mypy is not installed: scripts/setup.sh installs it")
    words = [sys.executable, "-m", "mypy", "--config-file", PACKAGE / "mypy.ini", "--cache-dir", os.devnull, "lockstep"]
    done = subprocess.run(words, cwd=PACKAGE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def public_names():
    for module in (lockstep, lockstep.optim, lockstep.nn, lockstep.errors):
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "").startswith("lockstep")
            if name.startswith("_") or not own or not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            yield f"{module.__name__}.{name}", value
            for member, function in vars(value).items() if inspect.isclass(value) else ():
                if not member.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                    yield f"{module.__name__}.{name}.{member}", function


def test_public_names_are_explained():
    silent = [name for name, value in public_names() if not inspect.getdoc(value) and value is not _C.ReduceOp]
    assert not silent
