"""Finds processes by a variable in their environment, so that a script can find all processes that it has started."""

import os
import pathlib
import signal


def environment(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.decode(errors="replace").split("\0") if "=" in entry)


def find_tagged(variable, value):
    """Returns pid -> environment of the live processes in whose environment `variable` is `value`."""
    found = {int(name): environment(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: env for pid, env in found.items() if env.get(variable) == value}


def find_ranks(variable, value):
    """Returns rank -> pid of those that are ranks of `lockstep run`."""
    return {
        int(env["LOCKSTEP_RANK"]): pid for pid, env in find_tagged(variable, value).items() if "LOCKSTEP_RANK" in env
    }


def kill_tagged(variable, value):
    for pid in find_tagged(variable, value):
        os.kill(pid, signal.SIGKILL)
