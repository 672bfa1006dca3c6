"""`lockstep build` with a compiler, cmake and ninja that only pretend; tests/install/without_root.py compiles."""

import io
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time

import pytest
import torch

from lockstep import _compatibility, _extension_build

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
OWN = "2.15.0a0+c0ffee.nv26.05"
CMAKE = f"""\
#!{sys.executable}
import os, pathlib, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("cmake version 3.31.6"))
print("words", *words)
if "--build" in words:
    if "CHILD" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        pathlib.Path(os.environ["CHILD"]).write_text(str(child.pid))
    for step in range(1, 10):
        print(f"[{{step}}/9] Building")
    sys.exit(os.environ.get("FAIL", 0))
if "--install" in words:
    folder = pathlib.Path(words[words.index("--prefix") + 1], "lockstep/_torch_2_15")
    folder.mkdir(parents=True)
    for name in ("liblockstep_core.so", "_C{SUFFIX}"):
        (folder / name).write_text(os.environ.get("CONTENT", "first"))
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A package, in a folder like site-packages, with sources; and what a build needs, in PATH."""
    package = tmp_path / "site-packages/lockstep"
    package.mkdir(parents=True)
    with tarfile.open(package / "_source.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("lockstep_ddp-0.1.0/CMakeLists.txt"), io.BytesIO())
    information = package.parent / "lockstep_ddp-0.1.0.dist-info"
    information.mkdir()
    (information / "RECORD").write_text("lockstep/__init__.py,sha256=x,1\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("c++", "cmake", "ninja"):
        (programs / name).write_text(CMAKE)
        (programs / name).chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(_extension_build, "PACKAGE", package)
    monkeypatch.setattr(_extension_build, "SOURCE", package / "_source.tar.gz")
    monkeypatch.setattr(torch, "__version__", OWN)
    return tmp_path


def failure():
    with pytest.raises(SystemExit) as caught:
        _extension_build.main()
    assert isinstance(caught.value.code, str) and caught.value.code.startswith("lockstep build: ")
    return caught.value.code


def left_over(machine):
    return sorted(path.name for path in (machine / "temporary").iterdir())


def test_installs_beside_the_package(machine, monkeypatch, capsys):
    _extension_build.main()
    package = machine / "site-packages/lockstep"
    folder = _compatibility.build_folder(package, OWN)
    assert sorted(path.name for path in folder.iterdir()) == [f"_C{SUFFIX}", "liblockstep_core.so"]
    assert _compatibility.find(package) == str(folder)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"lockstep build: installed in {folder}" and OWN in lines[0] and len(lines) == 4, lines
    assert left_over(machine) == []

    monkeypatch.setenv("CONTENT", "second")
    _extension_build.main()
    assert (folder / "liblockstep_core.so").read_text() == "second"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    record = (package.parent / "lockstep_ddp-0.1.0.dist-info/RECORD").read_text().splitlines()
    relative = folder.relative_to(package.parent)
    assert record == [
        "lockstep/__init__.py,sha256=x,1",
        f"{relative}/_C{SUFFIX},,",
        f"{relative}/liblockstep_core.so,,",
    ]


def test_installs_in_the_cache(machine, monkeypatch):
    access = os.access
    package = machine / "site-packages/lockstep"
    monkeypatch.setattr(os, "access", lambda path, mode: path != package and access(path, mode))
    _extension_build.main()
    folder = _compatibility.build_folder(machine / "cache/lockstep", OWN)
    assert _compatibility.find(package) == str(folder)
    assert not list(package.glob("_torch_*"))


def test_what_failed_is_printed_and_the_log_is_kept(machine, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", "the compiler's last words")
    said = failure()
    (log,) = left_over(machine)
    assert said.endswith(f"all are in {machine}/temporary/{log}")
    assert "the compiler's last words" in capsys.readouterr().err
    assert "words -G Ninja" in (machine / "temporary" / log).read_text()
    assert not list((machine / "site-packages/lockstep").glob("_torch_*"))


def test_what_was_started_ends_with_it(machine, monkeypatch):
    """As ninja and its compilers do, which cmake leaves behind."""
    file = machine / "child"
    monkeypatch.setenv("CHILD", str(file))
    say = _extension_build._say

    def interrupt(text):
        say(text)
        if "steps after" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(_extension_build, "_say", interrupt)
    with pytest.raises(SystemExit) as caught:
        _extension_build.main()
    assert caught.value.code == 130
    state = pathlib.Path(f"/proc/{file.read_text()}/stat")
    deadline = time.monotonic() + 60
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_what_is_missing_is_named(machine, monkeypatch):
    (machine / "programs/c++").unlink()
    assert "there is no C++ compiler in PATH; install g++" in failure()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX=no-such-compiler is not a program" in failure()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    assert "there is no /nowhere/Python.h" in failure()
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert failure() == "lockstep build: torch 2.10.0 is too old: pip install 'torch>=2.11,<2.16'"
    monkeypatch.setattr(_compatibility, "is_free_threaded", lambda: True)
    assert "is not supported" in failure()


def test_a_folder_that_cannot_be_written(machine, monkeypatch):
    (machine / "site-packages/lockstep/_torch_2.15.0a0+c0ffee.nv26.05").touch()
    assert "File exists" in failure()


def test_a_newer_torch_is_tried(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    _extension_build.main()
    assert "warning: torch 2.16.0 is newer than the tested versions" in capsys.readouterr().err


def test_cmake_from_pypi(machine, monkeypatch):
    """The commands that pip would run: there is no network here."""
    (machine / "programs/cmake").rename(machine / "programs/other")
    commands = []

    def run(command, environment, log, progress=False):
        commands.append([str(word) for word in command])
        if "--install" in command:
            subprocess.run([machine / "programs/other", *command[1:]], check=True)

    monkeypatch.setattr(_extension_build, "_run", run)
    _extension_build.main()
    assert commands[0][:4] == [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    assert commands[0][-2:] == ["cmake>=3.25", "ninja"]
    assert commands[1][0] == "cmake" and f"-DLOCKSTEP_CPYTHONS={sysconfig.get_path('include')}={SUFFIX}" in commands[1]


def test_the_program_runs_it():
    """In a Python without the package."""
    program = pathlib.Path(os.environ["LOCKSTEP_PROGRAM"])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [program, "build", "--python", "/usr/bin/python3"], cwd=folder, env={}, capture_output=True, text=True
        )
    assert done.returncode == 1 and re.fullmatch(
        r"lockstep build: .*python3 has no package lockstep; .*\n", done.stderr
    )
