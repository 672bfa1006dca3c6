"""The watch of a program that uses torch.distributed. Imported only by such programs, after torch."""

import atexit
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import socket
import sys
import threading

from _lockstep_hook import give_up, has_given_up

_INTERVAL_S = 0.5
_END_S = 10  # to read the flight recorder takes milliseconds, and seconds where many processes share a core
_LOOKS_IF_PENDING, _LOOKS_IF_COMPLETE = 1, 20  # intervals without progress after which the operations are read
_DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
}
# The names that torch.distributed has for some operations in its flight recorder.
_KINDS = {"all_reduce_barrier": "barrier", "_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}
# These block in Python, or are in no flight recorder.
_CALLS = ("send", "recv", "monitored_barrier", "new_group")
# The collectives, for versions of torch in which Gloo has no flight recorder.
_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
# The releases from which a child does not take locks of its parent's threads.
_FORK_FIXED = {(3, 10): (3, 10, 15), (3, 11): (3, 11, 10)}
_STORE_ARGUMENTS = (
    "host_name",
    "port",
    "world_size",
    "is_master",
    "timeout",
    "wait_for_workers",
    "multi_tenant",
    "master_listen_fd",
    "use_libuv",
)
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_watch = None


def _guarded(function):
    """An error ends the watch, not the program."""

    @functools.wraps(function)
    def call(*args):
        global _watch
        try:
            return function(*args)
        except Exception as error:
            ended, _watch = _watch, None
            give_up(error)
            if ended is not None:
                with contextlib.suppress(Exception):
                    ended.leave()
            return None

    return call


def wrap(c10d):
    """Wraps functions of torch.distributed.distributed_c10d, before others have imported them."""
    _guard_forks()
    calls = _CALLS if _recorder("_dump_fr_trace_json") else _CALLS + _COLLECTIVES
    for name in calls:
        if hasattr(c10d, name):
            setattr(c10d, name, _noting(name, getattr(c10d, name)))
    _note_method(c10d.Store, "get")
    _note_method(c10d.Store, "wait")
    for name in ("new_group", "split_group"):
        if hasattr(c10d, name):
            setattr(c10d, name, _around(getattr(c10d, name), after=lambda: _note_works(c10d)))
    _bind_store()
    begin, end = _noting("init_group", c10d.init_process_group), c10d.destroy_process_group
    c10d.init_process_group = _around(begin, lambda: _joining(c10d), lambda: _joined(c10d))
    c10d.destroy_process_group = _around(end, _record_ports, lambda: c10d.is_initialized() or _left())


def _around(function, before=lambda: None, after=lambda: None):
    """`function`, with a call of `before`, and of `after` unless it raises."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        before()
        result = function(*args, **kwargs)
        after()
        return result

    return call


def _bind_store():
    """A store of torch that rank 0 serves at MASTER_ADDR and MASTER_PORT listens at that address, and not on all
    interfaces: nothing there is authenticated."""
    store = getattr(sys.modules.get("torch._C._distributed_c10d"), "TCPStore", None)
    if store is None or sys.modules["torch"].__version__ < (2, 8):  # whose stores cannot take a socket
        return
    make = store.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        given = {**dict(zip(_STORE_ARGUMENTS, args, strict=False)), **kwargs}
        if given.get("is_master") and given.get("master_listen_fd") is None:
            bound = _master_socket(given.get("host_name"), given.get("port"))
            if bound is not None:
                return make(self, **{**given, "master_listen_fd": bound})
        return make(self, *args, **kwargs)

    store.__init__ = __init__


def _master_socket(host, port):
    """A socket that is bound to this address, for a store to close; None if it is not that of the job, or cannot be
    bound: as torch's own, it shares the port that the agent has reserved."""
    if (host, str(port)) != (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
        return None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            return bound.detach()
    except OSError:
        return None


@_guarded
def _note_works(c10d):
    """The backend lockstep shows its own waits for operations, and a note costs 3 % of a small one."""
    groups = getattr(getattr(c10d, "_world", None), "pg_map", None)  # another place in other versions of torch
    if groups is None or any(str(group[0]) != "lockstep" for group in groups.values()):
        _note_method(c10d.Work, "wait")


def _note_method(kind, name):
    function = getattr(kind, name)
    if not hasattr(function, "__wrapped__"):
        setattr(kind, name, _noting(f"{kind.__name__}.{name}", function))


def _recorder(name):
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, name, None)


_calls = []  # that have not returned


def _noting(name, function):
    numbers = itertools.count(1)
    get_thread, main_thread = threading.get_ident, threading.main_thread().ident
    begin, end = _calls.append, _calls.pop

    @functools.wraps(function)
    def call(*args, **kwargs):
        if get_thread() != main_thread:  # as one that listens for requests
            return function(*args, **kwargs)
        begin((name, next(numbers)))
        try:
            return function(*args, **kwargs)
        finally:
            end()

    return call


@_guarded
def _joining(c10d):
    """Before the program joins its world: ranks that wait for one that does not come are seen."""
    is_ours = not c10d.is_initialized() and os.environ.get("RANK") == os.environ.get("LOCKSTEP_RANK")
    if is_ours and _start_watch():
        _watch.join(os.environ.get("LOCKSTEP_RANK"), os.environ.get("LOCKSTEP_WORLD_SIZE"), "joining")


@_guarded
def _joined(c10d):
    _note_works(c10d)
    if _start_watch():
        _watch.join(c10d.get_rank(), c10d.get_world_size(), str(c10d.get_backend()))


def _start_watch():
    global _watch
    if has_given_up():
        return False
    if _watch is None:
        library = _load()
        if library is None:
            return False
        _watch = _Watch(library)
        _count_steps_and_batches(library)
        atexit.register(_ended)
    return True


@_guarded
def _left():
    if _watch is not None:
        _watch.leave()


@_guarded
def _record_ports():
    """The error of a peer that misses this rank names a port: where this rank listens, or from where it connected."""
    if _watch is None:
        return
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder
            sockets.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as connections:
            for words in map(str.split, connections):
                if words[9] in sockets:
                    _watch.library.lockstep_watch_uses_port(int(words[1].rpartition(":")[2], 16))


@_guarded
def _ended():
    """At the end of the program. After an exception the rank stays in the world, whose other ranks miss it."""
    if _watch is not None:
        _watch.end_thread()
    _record_ports()
    if not hasattr(sys, "last_type"):
        _left()


@_guarded
def _guard_forks():
    """Workers of a DataLoader are forked while threads of torch run. See lockstep_watch_guard_forks()."""
    if sys.implementation.name == "cpython" and sys.version_info < _FORK_FIXED.get(sys.version_info[:2], (0,)):
        _open_library().lockstep_watch_guard_forks()


@functools.cache
def _open_library():
    return ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "liblockstep_watch.so"))


def _load():
    library = _open_library()
    text, number = ctypes.c_char_p, ctypes.c_uint64
    library.lockstep_watch_join.argtypes = (ctypes.c_int, ctypes.c_int, text, text, ctypes.c_int)
    library.lockstep_watch_begin.argtypes = (text, number, text, text, number)
    library.lockstep_watch_begin.restype = number
    library.lockstep_watch_end.argtypes = (number,)
    library.lockstep_watch_look.argtypes = (ctypes.c_int,)
    library.lockstep_watch_handles.argtypes = (text,)
    return library if library.lockstep_watch_attach() else None


def _count_steps_and_batches(library):
    import torch
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)

    def count_step(stepped, *_):
        if not is_compiling() and not type(stepped).__module__.startswith("lockstep."):  # these count their own steps
            library.lockstep_watch_step()

    optimizer.register_optimizer_step_post_hook(count_step)
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = _around(iterator.__next__, after=library.lockstep_watch_batch)


class _Watch:
    def __init__(self, library):
        self.library = library
        self.stop = threading.Event()
        self.thread = None
        self.dumps = []
        self.seen = {}  # what each group, and the calls of Python, were at when they were looked at last
        self.begun = {}  # operations in which the rank has been seen to wait: their numbers in the page
        self.handled = b""  # what the page says

    def join(self, rank, size, backend):
        if (str(rank), str(size)) != (os.environ.get("LOCKSTEP_RANK"), os.environ.get("LOCKSTEP_WORLD_SIZE")):
            self.leave()  # a world of the program's own, such as that of mp.spawn()
            return
        job, label = os.environ.get("LOCKSTEP_JOB", ""), f"torch.distributed, {backend}"
        # The backend lockstep shows its own operations, and those of the NCCL that it uses.
        is_ours = "lockstep" in backend
        self.dumps = [dump for dump in map(_recorder, _RECORDERS[: 1 if is_ours else None]) if dump]
        self.library.lockstep_watch_join(int(rank), int(size), job.encode(), label.encode(), is_ours)
        if self.thread is None:
            self.stop = threading.Event()
            thread = threading.Thread(target=self.run, args=(self.stop,), name="lockstep-watch", daemon=True)
            thread.start()
            self.thread = thread

    def end_thread(self):
        """Waits for the thread. One that returns from C++ while the interpreter ends is unwound: the process aborts."""
        self.stop.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_END_S)
        self.thread = None

    def leave(self):
        self.end_thread()
        self.seen.clear()
        self.begun.clear()
        self.library.lockstep_watch_leave()

    @_guarded
    def run(self, stop):
        while not stop.wait(_INTERVAL_S):
            pending = [self.look_at_recorder(dump) for dump in self.dumps]
            self.library.lockstep_watch_look(any(pending))
            now = next(iter(_calls), None)
            if now is not None or "calls" in self.seen:
                self.look("calls", now, 1, lambda now=now: now and (b"Python calls", now[1], now[0].encode(), b"", 0))

    def look_at_recorder(self, dump):
        """Returns whether an operation is not complete."""
        recorded = json.loads(dump(False, False) or "{}")
        is_pending = False
        for group, status in recorded.get("pg_status", {}).items():
            enqueued, completed = (int(status[f"last_{what}_collective"]) for what in ("enqueued", "completed"))
            # With several threads, Gloo completes them in any order, so that the numbers only make a wait likely. To
            # read the operations takes up to 30 ms, which only a rank that makes no progress should spend.
            is_group_pending = enqueued > max(completed, 0)  # -1: none
            is_pending |= is_group_pending
            looks_needed = _LOOKS_IF_PENDING if is_group_pending else _LOOKS_IF_COMPLETE
            self.look((dump, group), (enqueued, completed), looks_needed, lambda g=group: _pending_operation(dump, g))
        return is_pending

    def look(self, place, state, looks_needed, describe):
        """Compares the state of a place with that of the last look. If it has been the same for some looks, the rank
        waits there in the operation that describe() returns, or waits for none if that is None."""
        before, looks = self.seen.get(place, (None, 0))
        if looks == 0 or before != state:
            self.library.lockstep_watch_alive()
            number = self.begun.pop(place, 0)
            self.library.lockstep_watch_end(number)
            if number:
                self.show_handled(b"")
            looks = 0
        elif looks == looks_needed:
            operation = describe()
            self.begun[place] = self.library.lockstep_watch_begin(*operation) if operation else 0
            if operation:
                self.show_handled(_handled_exception())
        self.seen[place] = (state, looks + 1)

    def show_handled(self, text):
        if text != self.handled:
            self.handled = text
            self.library.lockstep_watch_handles(text)


def _handled_exception():
    """What the main thread handles, by a `finally` block too: b"ValueError: bad value"; b"" for nothing, for an
    ImportError, with which a program often goes on, and for Python before 3.10, which does not tell."""
    current = getattr(sys, "_current_exceptions", dict)().get(threading.main_thread().ident)
    error = current[1] if isinstance(current, tuple) else current  # until 3.11 with its type and traceback
    for _ in range(100):  # a chain may be a ring
        error = getattr(error, "__context__", None) or error
    if error is None or isinstance(error, ImportError):
        return b""
    try:
        return f"{type(error).__name__}: {error}".encode(errors="replace")
    except Exception:  # of the program's own __str__()
        return type(error).__name__.encode(errors="replace")


def _pending_operation(dump, group):
    """Channel, number, kind, dtype and bytes of the oldest operation of a group that is not complete, or None."""
    pending = [
        entry
        for entry in json.loads(dump(True, False) or "{}").get("entries", [])
        if str(entry.get("pg_id")) == group and not entry.get("retired") and entry.get("state") != "completed"
    ]
    if not pending:
        return None
    first = min(pending, key=lambda entry: entry.get("record_id", 0))
    name, description = (*first["process_group"], "", "")[:2]
    is_named = description not in ("", "undefined")
    channel = "world" if description == "default_pg" else f"group {description if is_named else name}"
    dtype, size = _DTYPES.get((first["input_dtypes"] or [""])[0], ("", 0))
    num_bytes = size * sum(math.prod(sizes) for sizes in first["input_sizes"])
    kind = first["profiling_name"].rpartition(":")[2]
    kind = _KINDS.get(kind, kind)
    number = first["p2p_seq_id"] if first.get("is_p2p") else first["collective_seq_id"]
    return channel.encode(), number, kind.encode(), dtype.encode(), num_bytes
