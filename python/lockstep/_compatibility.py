"""Refuses a Python and a torch for which the extension was not built: it would crash, or not be found."""

import platform

from lockstep._build import PYTHON, TORCH, VERSION

_BUILD = (
    "build it for these: pip install scikit-build-core && pip install --no-build-isolation --no-deps "
    f"lockstep_ddp-{VERSION}.tar.gz (docs/how-to/wheel.md); the program `lockstep` works with any"
)


def check() -> None:
    """Raises ImportError, in one line, unless this Python and its torch are those of the build."""
    python = ".".join(platform.python_version_tuple()[:2])
    built = f"lockstep {VERSION} was built for torch {TORCH} and CPython {PYTHON}"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{built}, but there is no torch: pip install 'torch=={TORCH}.*'") from None
    if (python, platform.python_implementation()) != (PYTHON, "CPython") or not torch.__version__.startswith(
        TORCH + "."
    ):
        raise ImportError(
            f"{built}, but this is torch {torch.__version__} and {platform.python_implementation()} {python}; {_BUILD}"
        )
