"""Activates the hook in an interpreter in which Lockstep is not installed. `lockstep run` puts this folder on
PYTHONPATH.

Then it runs the module of this name that the interpreter would have found without it."""

import os
import sys


def _run():
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        import importlib.util

        if "_lockstep_hook" not in sys.modules:
            folder = os.path.dirname(here)
            spec = importlib.util.spec_from_file_location(
                "_lockstep_hook", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )
            module = importlib.util.module_from_spec(spec)
            sys.modules["_lockstep_hook"] = module
            spec.loader.exec_module(module)
            module.activate()
    except Exception as error:
        sys.stderr.write(f"lockstep: warning: this rank is not watched: {error!r}\n")
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"]
        module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
        spec.loader.exec_module(module)


_run()
