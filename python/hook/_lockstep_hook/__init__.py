"""Shows `lockstep run` what a rank does that uses torch.distributed without Lockstep.

activate() runs when the interpreter starts, and only under `lockstep run`. It waits until the program itself imports
torch.distributed. Except that torch's store listens on one address, the program sees no change. From
init_process_group() on, a thread looks twice per second at the flight recorder of torch, which knows the collectives
that are enqueued and completed, and writes the page of this rank that the launcher reads. An error here ends the watch,
with one warning, and never the program.

LOCKSTEP_WATCH=off switches it off. Under `lockstep plan`, profile.py records the steps as well.
"""

import os
import sys

_STACK_SIGNAL = 50  # a real-time signal, see lockstep/launch/process/python_stacks.h
_active = _has_given_up = False


def activate():
    global _active
    if _active or os.environ.get("LOCKSTEP_WATCH") == "off":
        return
    _active = True
    try:
        import faulthandler

        # The launcher sends this signal to a process that makes no progress, and reads the stacks from this file.
        faulthandler.register(_STACK_SIGNAL, os.memfd_create("lockstep-python-stacks"), all_threads=True, chain=False)
        sys.meta_path.insert(0, _Finder())
    except Exception as error:
        give_up(error)


def give_up(error):
    global _has_given_up
    if _has_given_up:
        return
    _has_given_up = True
    sys.stderr.write(f"lockstep: warning: this rank is not watched any more: {error!r}\n")


def has_given_up():
    return _has_given_up


def _wrap_distributed(module):
    from _lockstep_hook import watch

    watch.wrap(module)


def _keep_files(module):
    from _lockstep_hook import profile

    profile.keep_files(module)


def _wrap_ddp(module):
    from _lockstep_hook import profile

    profile.wrap(module)


_IMPORTED = {"torch.distributed.distributed_c10d": _wrap_distributed}
if "LOCKSTEP_PROFILE" in os.environ:
    _IMPORTED |= {"torch.serialization": _keep_files, "torch.nn.parallel.distributed": _wrap_ddp}


class _Finder:
    """Waits for the imports of _IMPORTED."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _IMPORTED:
            return None
        try:
            others = [f for f in sys.meta_path if hasattr(f, "find_spec") and not isinstance(f, _Finder)]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
            if spec is not None:
                _call_after_execution(spec, _IMPORTED[name])
            return spec
        except Exception as error:
            give_up(error)
            return None


def _call_after_execution(spec, call):
    execute = spec.loader.exec_module

    def exec_module(module):
        execute(module)
        try:
            call(module)
        except Exception as error:
            give_up(error)

    spec.loader.exec_module = exec_module
