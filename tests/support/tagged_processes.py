"""Finds processes by a variable in their environment, so that a script can find all processes that it has started."""

import os
import pathlib


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
