"""`lockstep build`: compiles the extension for the torch and the CPython that run this module, from the sources in the
package, and installs it where lockstep/_compatibility.py looks first. The program `lockstep` calls main() in a package
that has not been executed, because that would fail without the extension."""

import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import types
from collections.abc import Iterator
from typing import NoReturn, TextIO, cast

from lockstep import _compatibility
from lockstep._build import VERSION

PACKAGE = pathlib.Path(__file__).parent
SOURCE = PACKAGE / "_source.tar.gz"  # the source distribution
CMAKE = (3, 25)
LAST_LINES = 20  # of the log, that a failure prints


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _build()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        _fail(str(error))


def _build() -> None:
    torch = _torch()
    options = _headers_of_cpython()
    compiler = _compiler()
    target = _target(torch.__version__)
    if not SOURCE.exists():
        _fail(f"{PACKAGE} was built from sources and does not contain them; build and install it again for this torch")
    if _compatibility.minor_of(torch.__version__) > _compatibility.NEWEST:
        _say(f"warning: torch {torch.__version__} is newer than the tested versions; it may not compile")
    with tempfile.TemporaryDirectory(prefix="lockstep-build-") as work, _log() as log:
        folder = pathlib.Path(work)
        tools = _tools(folder / "tools", log)
        _say(
            f"lockstep {VERSION} for torch {torch.__version__} and {_compatibility.python_name()}, with {compiler}; "
            f"{_compatibility.COST}; log: {log.name}"
        )
        with tarfile.open(SOURCE) as archive:
            archive.extractall(folder)
        (source,) = folder.glob("lockstep_ddp-*")
        for name in ("TESTS", "EXAMPLES"):
            options[f"LOCKSTEP_{name}"] = "OFF"
        options |= {
            "CMAKE_BUILD_TYPE": "Release",
            "LOCKSTEP_UNITY": "ON",
            "CMAKE_CXX_COMPILER": compiler,
            "Torch_DIR": pathlib.Path(torch.__path__[0], "share/cmake/Torch"),
        }
        build = folder / "build"
        configure = ["cmake", "-G", "Ninja", "-S", source, "-B", build]
        _run([*configure, *(f"-D{name}={value}" for name, value in options.items())], tools, log)
        _run(["cmake", "--build", build, "--target", "lockstep_python", *_jobs()], tools, log, progress=True)
        install = ["cmake", "--install", build, "--component", "extension", "--prefix", folder / "installed", "--strip"]
        _run(install, tools, log)
        (built,) = folder.glob("installed/lockstep/_torch_*")
        _install(built, target)
    _say(f"installed in {target}")


def _torch() -> types.ModuleType:
    if _compatibility.is_free_threaded():
        _fail(f"{_compatibility.python_name()} is not supported; expected one with a GIL")
    try:
        import torch
    except ModuleNotFoundError as error:
        _fail(f"{sys.executable} has no {error.name}: pip install {_compatibility.TORCH}")
    if _compatibility.minor_of(torch.__version__) < _compatibility.OLDEST:
        _fail(f"torch {torch.__version__} is too old: pip install {_compatibility.TORCH}")
    return torch


def _headers_of_cpython() -> dict[str, object]:
    include = sysconfig.get_path("include")
    if not pathlib.Path(include, "Python.h").exists():
        _fail(
            f"there is no {include}/Python.h; install the headers of this Python (Debian: python3-dev), or use a "
            "Python that has them, such as those of uv, conda and pyenv"
        )
    return {"LOCKSTEP_CPYTHONS": f"{include}={sysconfig.get_config_var('EXT_SUFFIX')}"}


def _compiler() -> str:
    """Returns the path of the C++ compiler. CMake finds the C compiler beside it."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    what = f"CXX={shlex.quote(named)} is not a program" if named else "there is no C++ compiler in PATH"
    _fail(f"{what}; install g++ (conda: gxx), or set CXX to a compiler of C++20")


def _target(torch: str) -> pathlib.Path:
    """Returns the folder to install in: beside the package, else in the user's cache."""
    for root in _compatibility.build_roots(PACKAGE):
        if root != PACKAGE:
            with contextlib.suppress(OSError):
                root.mkdir(parents=True, exist_ok=True)
        if root.is_absolute() and os.access(root, os.W_OK):
            return _compatibility.build_folder(root, torch)
    _fail(f"neither {PACKAGE} nor {root} can be written; set XDG_CACHE_HOME to a folder that can")


@contextlib.contextmanager
def _log() -> Iterator[TextIO]:
    """A file that is kept if the build fails."""
    with tempfile.NamedTemporaryFile("w", buffering=1, prefix="lockstep-build-", suffix=".log", delete=False) as log:
        yield cast(TextIO, log)
    os.unlink(log.name)


def _tools(folder: pathlib.Path, log: TextIO) -> dict[str, str]:
    """Returns the environment in which cmake and ninja are found, after installing them in `folder` if they are
    missing."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path}
    if shutil.which("ninja", path=path) and _cmake_version(environment) >= CMAKE:
        return environment
    wanted = [f"cmake>={CMAKE[0]}.{CMAKE[1]}", "ninja"]
    if importlib.util.find_spec("pip"):
        install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    elif uv := shutil.which("uv", path=path):
        install = [uv, "pip", "install", "--python", sys.executable]
    else:
        _fail(f"cmake {CMAKE[0]}.{CMAKE[1]} and ninja are needed, and this Python has no pip to install them")
    _say("cmake and ninja come from PyPI, for this build alone")
    _run([*install, "--quiet", "--only-binary=:all:", "--target", folder, *wanted], environment, log)
    environment["PATH"] = os.pathsep.join([str(folder / "bin"), path])
    environment["PYTHONPATH"] = str(folder)  # of the scripts in bin
    return environment


def _cmake_version(environment: dict[str, str]) -> tuple[int, int]:
    try:
        text = subprocess.run(["cmake", "--version"], env=environment, capture_output=True, text=True).stdout
    except OSError:
        return (0, 0)
    found = re.search(r"version (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _jobs() -> list[str]:
    """As many compilations as there are cores, and memory for: a source with libtorch takes up to 2 GB."""
    if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ:
        return []
    available = re.search(r"MemAvailable: *(\d+)", pathlib.Path("/proc/meminfo").read_text())
    sources = int(available[1]) >> 21 if available else 1
    return ["-j", str(max(1, min(len(os.sched_getaffinity(0)), sources)))]


def _run(command: list[object], environment: dict[str, str], log: TextIO, progress: bool = False) -> None:
    """Runs a program and appends its output to the log. With `progress`, prints a line for each third of ninja's
    steps."""
    words = [str(word) for word in command]
    log.write(f"$ {shlex.join(words)}\n")
    begin, thirds = time.monotonic(), 1
    with subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # cmake does not pass signals on to ninja
    ) as process:
        try:
            for line in process.stdout or ():
                log.write(line)
                step = re.match(r"\[(\d+)/(\d+)\]", line)
                if progress and step and thirds < 3 and int(step[1]) * 3 >= int(step[2]) * thirds:
                    _say(f"{step[1]} of {step[2]} steps after {(time.monotonic() - begin) / 60:.1f} minutes")
                    thirds += 1
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode:
        lines = pathlib.Path(log.name).read_text(errors="replace").splitlines()
        print(*lines[-LAST_LINES:], sep="\n", file=sys.stderr)
        _fail(f"{words[0]} failed with exit code {process.returncode}; its last lines are above, all are in {log.name}")


def _install(built: pathlib.Path, target: pathlib.Path) -> None:
    """Moves the libraries to `target` at once; an earlier build there is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as new:
        shutil.copytree(built, pathlib.Path(new, "new"))
        if target.exists():
            target.rename(pathlib.Path(new, "old"))
        pathlib.Path(new, "new").rename(target)
    _record(target)


def _record(target: pathlib.Path) -> None:
    """Adds the libraries to the list of the wheel's files, so that pip removes them with the package."""
    site_packages = PACKAGE.parent
    record = next(site_packages.glob("lockstep_ddp-*.dist-info/RECORD"), None)
    if PACKAGE not in target.parents or not record:
        return
    lines = record.read_text().splitlines()
    lines += [f"{file.relative_to(site_packages)},," for file in sorted(target.iterdir())]
    temporary = record.with_name("RECORD.new")
    temporary.write_text("\n".join(dict.fromkeys(lines)) + "\n")
    temporary.replace(record)


def _say(text: str) -> None:
    print(f"lockstep build: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> NoReturn:
    sys.exit(f"lockstep build: {text}")
