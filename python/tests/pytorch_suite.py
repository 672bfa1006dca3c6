"""Runs PyTorch's own tests of process groups (distributed_test.py of the installed torch) over the backend "lockstep".

Usage: pytorch_suite.py [-k PATTERN]... [--backend lockstep|gloo|off] [--world-size N]

Without --backend, the tests run over torch's Gloo and over Lockstep, one after the other, and every test that passes
over Gloo must pass over Lockstep. The exit code is 1 if one does not.

The suite decides by the name "gloo" which tests a CPU backend must pass. So this file gives it that name, makes each
group of that name one of Lockstep, and asserts on each rank that it is. With --backend off it only asserts, so every
test must fail. The ranks of a test are forked from a process that has imported torch, which saves most of the suite's
time.
"""

import argparse
import functools
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

BACKEND = os.environ.get("PYTORCH_SUITE_BACKEND", "")  # set in the processes that run tests

if BACKEND:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed import distributed_test as suite

    if BACKEND != "gloo":
        import lockstep  # noqa: F401

    init, new_group, get_backend = dist.init_process_group, c10d.new_group, dist.get_backend
    get_profiling_event = suite.get_profiling_event
    get_ddp_logging_data = DistributedDataParallel._get_ddp_logging_data

    def over_lockstep(make):
        """`make` makes groups; those of "gloo", or of no name, become groups of Lockstep."""

        @functools.wraps(make)
        def wrapper(*arguments, **named):
            if BACKEND == "lockstep":
                arguments = ["lockstep" if one == "gloo" else one for one in arguments]
                if named.get("backend") == "gloo" or (make is init and not arguments and not named.get("backend")):
                    named["backend"] = "lockstep"
            group = make(*arguments, **named)
            name = c10d._get_default_group()._get_backend(torch.device("cpu")).name()
            assert name == "lockstep", f"the default group is one of {name}"
            return group

        return wrapper

    def events_of_lockstep(name, *arguments, **named):
        """The profiler's events of Lockstep, under the names that the tests compare."""
        events = get_profiling_event(name.replace("gloo:", "lockstep:"), *arguments, **named)
        for event in events:
            event.name = event.name.replace("lockstep:", "gloo:")
        return events

    def logging_data_of_lockstep(model):
        """DistributedDataParallel's own data: torch calls every backend from outside torch "custom", and adds Gloo's
        variables only for its own."""
        data = get_ddp_logging_data(model)
        if data["backend_name"] == "custom":
            data["backend_name"] = "gloo"
            for name in ("GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME"):
                data[name.lower()] = os.environ.get(name, "N/A")
            data["gloo_num_threads"] = 2  # torch's default
        return data

    if BACKEND != "gloo":
        dist.init_process_group = c10d.init_process_group = over_lockstep(init)
        dist.new_group = c10d.new_group = over_lockstep(new_group)
        dist.get_backend = c10d.get_backend = lambda group=None: get_backend(group).replace("lockstep", "gloo")
        suite.get_profiling_event = events_of_lockstep
        DistributedDataParallel._get_ddp_logging_data = logging_data_of_lockstep

    class PyTorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            fork = multiprocessing.get_context("forkserver").Process

            def with_environment(kwargs, **named):
                return fork(kwargs={**kwargs, "environment": dict(os.environ)}, **named)

            self._start_processes(with_environment)

        @classmethod
        def _run(cls, *arguments, environment, **named):
            os.environ.update(environment)  # that of the test; the process has inherited that of the fork server
            super()._run(*arguments, **named)


class Outcomes(unittest.TextTestResult):
    """Collects the names of tests that passed, were skipped or failed; prints a line for each."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.outcomes = {}

    def stopTest(self, test):
        name = test.id().split(".")[-1]
        failed = [of for of, _ in self.failures + self.errors if of is test]
        skipped = [of for of, _ in self.skipped if of is test]
        self.outcomes[name] = "failed" if failed else "skipped" if skipped else "passed"
        super().stopTest(test)


def run_tests(patterns):
    """Runs the tests over BACKEND. Returns their outcomes by name."""
    modules = ["torch.testing._internal.distributed.distributed_test", *(["lockstep"] if BACKEND != "gloo" else [])]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*{pattern}*" for pattern in patterns] or None
    result = unittest.TextTestRunner(resultclass=Outcomes, verbosity=2).run(loader.loadTestsFromTestCase(PyTorchSuite))
    return result.outcomes


def run_process(backend, options):
    """Runs the tests over `backend` in a process of its own, whose output goes to a file. Returns their outcomes, the
    name of the file, and seconds."""
    folder = pathlib.Path(options.folder)
    temporary, results, log = folder / backend, folder / f"{backend}.json", folder / f"{backend}.log"
    (temporary / "barrier").mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTORCH_SUITE_BACKEND": backend,
        "PYTORCH_SUITE_RESULTS": str(results),
        "BACKEND": "gloo",
        "WORLD_SIZE": str(options.world_size),
        "TEMP_DIR": str(temporary),
        "TMPDIR": str(temporary),
        "LOCKSTEP_LOG": "quiet",
    }
    began = time.monotonic()
    with log.open("w") as output:
        words = [sys.executable, __file__, *(word for pattern in options.patterns for word in ("-k", pattern))]
        code = subprocess.run(words, env=environment, stdout=output, stderr=output, timeout=1500).returncode
    if code != 0:
        sys.exit(f"{log.read_text()}\nthe tests over {backend} ended with {code}")
    return json.loads(results.read_text()), log, time.monotonic() - began


def names_of(outcomes, outcome):
    return sorted(name for name, of in outcomes.items() if of == outcome)


def report(backend, outcomes, seconds):
    counts = ", ".join(f"{len(names_of(outcomes, one))} {one}" for one in ("passed", "failed", "skipped"))
    print(f"{backend}: {counts}, {seconds:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="patterns", action="append", default=[])
    parser.add_argument("--backend", choices=["lockstep", "gloo", "off"])
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    if BACKEND:
        pathlib.Path(os.environ["PYTORCH_SUITE_RESULTS"]).write_text(json.dumps(run_tests(options.patterns)))
        return 0
    with tempfile.TemporaryDirectory(prefix="lockstep-pytorch-suite-") as options.folder:
        backends = [options.backend] if options.backend else ["gloo", "lockstep"]
        runs = {}
        for backend in backends:
            runs[backend], log, seconds = run_process(backend, options)
            report(backend, runs[backend], seconds)
            if names_of(runs[backend], "failed"):
                print(log.read_text())
    if options.backend:
        print("\n".join(names_of(runs[options.backend], "failed")))
        return 1 if names_of(runs[options.backend], "failed") or not names_of(runs[options.backend], "passed") else 0
    expected, passed = set(names_of(runs["gloo"], "passed")), set(names_of(runs["lockstep"], "passed"))
    print(f"passed over Gloo and not over Lockstep: {' '.join(sorted(expected - passed)) or 'none'}")
    print(f"passed over Lockstep only: {' '.join(sorted(passed - expected)) or 'none'}")
    print(f"passed over neither: {' '.join(sorted(set(runs['gloo']) - passed - expected)) or 'none'}")
    return 1 if expected - passed or not expected else 0


if __name__ == "__main__":
    sys.exit(main())
