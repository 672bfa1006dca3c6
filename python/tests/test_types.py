"""The types of the package agree with each other and with those of the binding, and all public names are explained. One
rank; no launcher."""

import inspect
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import lockstep
from lockstep import _C

PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def run(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(lockstep.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_agree(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: scripts/setup.sh installs it")
    # The stub of the binding has the types of its functions in C++.
    stubgen = "import sys\nfrom mypy import stubgen\nstubgen.main(sys.argv[1:])"
    run(os.getcwd(), "-c", stubgen, "-m", "lockstep._C", "-o", tmp_path)
    assert (tmp_path / "lockstep/_C.pyi").exists()
    shutil.copytree(PACKAGE / "lockstep", tmp_path / "lockstep", dirs_exist_ok=True)
    shutil.copy(PACKAGE / "_lockstep_backend.py", tmp_path)
    run(tmp_path, "-m", "mypy", "--config-file", PACKAGE / "mypy.ini", "--cache-dir", os.devnull, "lockstep")


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
