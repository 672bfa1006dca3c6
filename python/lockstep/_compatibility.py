"""Finds the extension for this CPython and its torch. With another one, a program would crash, or miss symbols."""

from __future__ import annotations  # CPython 3.9 is named as well

import os
import pathlib
import platform
import re
import sys
import sysconfig

from lockstep._build import VERSION

# A release of the minor version 2.N; others, such as 2.11.0a0+nv26.05, lie between two of them.
_RELEASE = re.compile(r"2\.(\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?")
OLDEST, NEWEST = (2, 11), (2, 15)  # minor versions of torch, as in cmake/LockstepTorch.cmake
COST = "about 6 minutes of one core"
TORCH = "'torch>=2.11,<2.16'"


def find(folder: pathlib.Path) -> str:
    """Returns the folder of the extension: one that `lockstep build` has installed for exactly this torch, else one of
    the wheel, in `folder`. Raises ImportError, in one line, if there is none; CPython is looked at first, because torch
    is large."""
    own = sysconfig.get_config_var("EXT_SUFFIX")
    for build in [build for root in build_roots(folder) for build in root.glob(_build_name("*"))]:
        if build.match(_build_name(_torch_version() or "")) and (build / f"_C{own}").exists():
            return str(build)
    suffixes: dict[int, list[str]] = {}
    for extension in folder.glob("_torch_2_*/_C.*.so"):
        minor = int(extension.parent.name.rpartition("_")[2])
        suffixes.setdefault(minor, []).append(extension.name.removeprefix("_C"))
    minors = sorted(minor for minor, found in suffixes.items() if own in found)
    if not minors:
        tags = {re.sub(r"\.cpython-(\d)(\d+)-.*", r"\1.\2", suffix) for found in suffixes.values() for suffix in found}
        built = _listed(sorted(tags, key=lambda tag: int(tag.rpartition(".")[2])))
        remedy = f"lockstep build compiles it for this one ({COST})"
        if is_free_threaded():
            remedy = "expected one with a GIL: free-threaded ones are not supported"
        elif sys.version_info.minor < 10:
            remedy = "expected 3.10 or newer"
        raise ImportError(f"lockstep {VERSION} was built for CPython {built}, but this is {python_name()}; {remedy}")
    built = f"lockstep {VERSION} was built for torch {_listed([f'2.{minor}' for minor in minors])}"
    version = _torch_version()
    if version is None:
        newest = minors[-1] + 1
        raise ImportError(f"{built}, but there is no torch: pip install 'torch>=2.{minors[0]},<2.{newest}'")
    release = _RELEASE.fullmatch(version)
    if not release or int(release[1]) not in minors:
        raise ImportError(f"{built}, but this is torch {version}; {_remedy(version)}")
    return str(folder / f"_torch_2_{release[1]}")


def build_roots(package: pathlib.Path) -> list[pathlib.Path]:
    """The folders in which `lockstep build` installs, in the order of preference."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [package, pathlib.Path(cache, "lockstep")]


def build_folder(root: pathlib.Path, torch: str) -> pathlib.Path:
    """The folder in `root` of a build for this version of torch and this CPython, by this version of Lockstep."""
    return root / _build_name(torch)


def minor_of(torch: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch)[:2]
    return int(major), int(minor)


def is_free_threaded() -> bool:
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def python_name() -> str:
    threads = "free-threaded " if is_free_threaded() else ""
    return f"{threads}{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"


def _build_name(torch: str) -> str:
    cpython = sysconfig.get_config_var("EXT_SUFFIX").removesuffix(".so")
    return f"_torch_{re.sub(r'[^A-Za-z0-9.+*]', '_', torch)}/{VERSION}{cpython}"


def _torch_version() -> str | None:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return torch.__version__


def _remedy(torch: str) -> str:
    if minor_of(torch) < OLDEST:
        return f"it is too old: pip install {TORCH}"
    if minor_of(torch) > NEWEST:
        return f"lockstep build may fail to compile it for this one, which is newer than 2.{NEWEST[1]} ({COST})"
    return f"lockstep build compiles it for this one ({COST})"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
