"""Processes that carry a mark in their environment: how scripts here find what they have started, wherever it has gone."""

import os
import pathlib


def environment(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.decode(errors="replace").split("\0") if "=" in entry)


def marked(variable, value):
    """Live processes in whose environment `variable` is `value`: pid -> environment."""
    found = {int(name): environment(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: env for pid, env in found.items() if env.get(variable) == value}
