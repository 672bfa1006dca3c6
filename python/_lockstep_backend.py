"""Makes the backend "lockstep" known to torch.distributed. Entry points of the distribution call register(): torch 2.11
to 2.14 at the end of `import torch`, later versions when a program first asks for the backend. So it must be light, and
must not fail: what it needs is imported when a group is made."""

import warnings
from typing import Any


def register() -> None:
    """Registers the backend, unless it is known. Never raises."""
    try:
        from torch.distributed import Backend, is_available

        if is_available() and "LOCKSTEP" not in Backend._plugins:
            Backend.register_backend("lockstep", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        warnings.warn(f"lockstep: the backend of torch.distributed is not available: {error}", stacklevel=2)


def _create(options: Any, backend_options: Any) -> Any:
    from lockstep import _backend

    return _backend.create(options, backend_options)
