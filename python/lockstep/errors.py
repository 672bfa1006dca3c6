"""The exceptions of this package. All derive from Error, which tells the cause in the words of the FATAL line."""

import builtins


class Error(RuntimeError):
    """The base class of all exceptions that Lockstep raises.

    Attributes:
        cause: why, as in the launcher's FATAL line: "DESYNC", "PEER_UNREACHABLE", ...; by default
            "INTERNAL", and "BAD_ARG" of a UsageError.
        hint: what to do about it; "" if the message says so.
        op: the operation, such as "all_reduce(fc.weight)#12"; "" if the error is of none.
        rank: the rank that raises the error; -1 if unknown.
        peer: the rank at fault; -1 if unknown.
    """

    _DEFAULT_CAUSE = "INTERNAL"

    def __init__(
        self, message: str, *, cause: str = "", hint: str = "", op: str = "", rank: int = -1, peer: int = -1
    ) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.cause = cause or self._DEFAULT_CAUSE
        self.hint = hint
        self.op = op
        self.rank = rank
        self.peer = peer


class UsageError(Error, ValueError):
    """An invalid call, option, argument or environment variable. Nothing was changed."""

    _DEFAULT_CAUSE = "BAD_ARG"


class FormatError(Error):
    """A file violates its format. The message begins with the file and the place in it."""


class SystemError(Error):
    """A system call failed."""


class CommError(Error):
    """An operation between ranks failed. Its group is closed: every later call raises the same error."""


class DesyncError(CommError):
    """Ranks made different calls. The message names two ranks and both calls."""


class TimeoutError(CommError, builtins.TimeoutError):
    """An operation did not finish before its deadline."""


class PeerLostError(CommError):
    """The connection to another rank ended: it died or left, or the network failed."""
