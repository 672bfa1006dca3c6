"""Activates the hook in an interpreter in which Lockstep is not installed. `lockstep run` puts this folder on
PYTHONPATH.

Then it runs the module of this name that the interpreter would have found without it. Imports only what the interpreter
has imported already, because every program starts with it."""

import os
import sys


def _run():
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        if "_lockstep_hook" not in sys.modules:
            sys.path.insert(0, os.path.dirname(os.path.dirname(here)))
            try:
                import _lockstep_hook
            finally:
                del sys.path[0]
            _lockstep_hook.activate()
    except Exception as error:
        sys.stderr.write(f"lockstep: warning: this rank is not watched: {error!r}\n")
    from _frozen_importlib_external import PathFinder

    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"]
        module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
        spec.loader.exec_module(module)


_run()
