"""Finds the extension for this CPython and its torch. With another one, a program would crash, or miss symbols."""

import pathlib
import platform
import re
import sys
import sysconfig

from lockstep._build import VERSION

# A release of the minor version 2.N; others, such as 2.11.0a0+nv26.05, lie between two of them.
_RELEASE = re.compile(r"2\.(\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?")
_BUILD = (
    "build it for this one: pip install scikit-build-core && pip install --no-build-isolation --no-deps "
    f"lockstep_ddp-{VERSION}.tar.gz (docs/how-to/wheel.md)"
)


def find(folder: pathlib.Path) -> str:
    """Returns the folder of the extension, in `folder`. Raises ImportError, in one line, if there is none; CPython is
    looked at first, because torch is large."""
    suffixes: dict[int, list[str]] = {}
    for extension in folder.glob("_torch_2_*/_C.*.so"):
        minor = int(extension.parent.name.rpartition("_")[2])
        suffixes.setdefault(minor, []).append(extension.name.removeprefix("_C"))
    own = sysconfig.get_config_var("EXT_SUFFIX")
    minors = sorted(minor for minor, found in suffixes.items() if own in found)
    if not minors:
        tags = {re.sub(r"\.cpython-(\d)(\d+)-.*", r"\1.\2", suffix) for found in suffixes.values() for suffix in found}
        built = _listed(sorted(tags, key=lambda tag: int(tag.rpartition(".")[2])))
        raise ImportError(f"lockstep {VERSION} was built for CPython {built}, but this is {_python()}; {_BUILD}")
    built = f"lockstep {VERSION} was built for torch {_listed([f'2.{minor}' for minor in minors])}"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{built}, but there is no torch: pip install 'torch>=2.{minors[0]},<2.{minors[-1] + 1}'"
        ) from None
    release = _RELEASE.fullmatch(torch.__version__)
    if not release or int(release[1]) not in minors:
        raise ImportError(f"{built}, but this is torch {torch.__version__}; {_BUILD}")
    return str(folder / f"_torch_2_{release[1]}")


def _python() -> str:
    threads = "free-threaded " if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"{threads}{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
