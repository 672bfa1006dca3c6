"""Publishes an exception that ends this process as the job's first cause, and leaves the job when the process ends."""

import atexit
import contextlib
import io
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from lockstep import _C
from lockstep.errors import CommError, Error, PeerLostError


class Owner(Protocol):
    """What must end before the process does; a group comes last."""

    _CLOSE_ORDER: int

    def _close(self) -> None: ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_checks: list[Callable[[], None]] = []
_failed = False
PREEMPTED = 75
"""Exit code that asks `lockstep run` and schedulers to start the job again."""
_process = 0  # its id; not that of a child made by fork()


def add_owner(owner: Owner) -> None:
    """At the end of the process, calls owner._close(), unless an exception ends it."""
    _owners.add(owner)


def text_of(error: BaseException) -> str:
    """Returns the message of an exception on one line, preceded by that of the first exception in its chain."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _C.exception_text(lines) or traceback.format_exception_only(type(error), error)[-1].strip().split("\n")[0]


def _first_of(error: BaseException) -> BaseException:
    """The exception during whose handling the others were raised, or their cause."""
    for _ in range(100):  # a chain may be a ring
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        error = before
    return error


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    # The text is that of torch's allocator for CPUs, which raises RuntimeError.
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in text


def report(error: BaseException) -> int:
    """Publishes `error`. Returns the exit code with which the process should end."""
    global _failed
    _failed = True
    if isinstance(error, Error):
        # By a call in a `finally` block or an exception handler, which the other ranks did not make, or all of them
        # make. A program that trains where it has caught an ImportError has not failed by that.
        is_handling = isinstance(error, CommError) and not isinstance(_first_of(error), (Error, ImportError))
        if is_handling and error.cause in ("DESYNC", "UNEVEN_INPUT"):
            return _C.report_failure("RANK_EXITED", text_of(error), "", led_to_cause=True)
        if is_handling and isinstance(error, PeerLostError):
            _C.report_failure("PEER_UNREACHABLE", "", "", led_to_cause=True)
        message = str(error).removesuffix(f"; {error.hint}") if error.hint else str(error)
        return _C.report_failure(error.cause, message, error.hint)
    text = text_of(error)
    return _C.report_failure("RESOURCE" if _is_out_of_memory(error, text) else "RANK_EXITED", text, "")


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    _previous_hook(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt) or os.getpid() != _process:
        return
    code = report(error)
    if code == 1:
        return  # as Python does by itself
    atexit._run_exitfuncs()
    # torch's hook of init_process_group() calls this one, and would print afterwards what it holds back meanwhile.
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        held, sys.stderr = sys.stderr, sys.__stderr__
        sys.stderr.write(held.getvalue())
    _exit(code)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def check_at_end(check: Callable[[], None]) -> None:
    """At the end of the process, unless an exception ends it, calls check(), whose Error ends it as an uncaught one."""
    _checks.append(check)


def _leave() -> None:
    if _failed:
        return
    for check in _checks if os.getpid() == _process else []:
        try:
            check()
        except Error as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            _exit(report(error))
    for owner in sorted(_owners, key=lambda owner: owner._CLOSE_ORDER):
        owner._close()


_previous_hook = sys.excepthook
_is_installed = False


def install() -> None:
    """Takes effect once, in the process that calls it."""
    global _previous_hook, _process, _is_installed
    _process = os.getpid()
    if _is_installed:  # another hook, such as torch's, may call ours meanwhile
        return
    _is_installed = True
    _previous_hook = sys.excepthook
    sys.excepthook = _on_uncaught
    atexit.register(_leave)
