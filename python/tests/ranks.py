"""Runs functions of tests on the ranks of a job, which stay for the tests of all files that one pytest runs.

>>> @on_ranks(1, 2)
... def test_sum(world):
...     tensor = torch.ones(2)
...     world.all_reduce(tensor)
...     assert tensor[0] == world.size

The function runs on every rank; an exception on one fails the test. The ranks are started at the first test with their
number, by `lockstep run`. Tests that end the ranks, or close their world, ask for ranks of their own:
on_ranks(2, fresh=True). Temporary files of the ranks are removed when these have ended.
"""

import functools
import importlib.util
import multiprocessing.connection
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
import traceback

import pytest

START_SECONDS, TEST_SECONDS = 60, 120


class Ranks:
    """`size` processes that wait for functions to run."""

    def __init__(self, size, options=()):
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-python-tests-")
        key = secrets.token_bytes(16)
        listener = multiprocessing.connection.Listener(str(pathlib.Path(self.folder.name) / "socket"), authkey=key)
        self.output = tempfile.TemporaryFile()
        words = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", str(size), "--bind", "none", *options, "--"]
        self.job = subprocess.Popen(
            [*words, sys.executable, __file__, listener.address],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RANKS_TEST_KEY": key.hex(), "TMPDIR": self.folder.name},
        )
        self.connections = {}
        end = time.monotonic() + START_SECONDS
        listener._listener._socket.settimeout(0.5)
        try:
            while len(self.connections) < size:
                if self.job.poll() is not None or time.monotonic() > end:
                    self.job.terminate()
                    self.job.wait()
                    raise AssertionError("the ranks did not start:\n" + self.said())
                try:
                    connection = listener.accept()
                except TimeoutError:
                    continue
                self.connections[connection.recv()] = connection
        finally:
            listener.close()

    def run(self, function, *arguments):
        """Runs the function on every rank and returns their results in the order of ranks."""
        for connection in self.connections.values():
            connection.send((function.__code__.co_filename, function.__name__, arguments))
        results, errors = [], []
        for rank in range(self.size):
            connection = self.connections[rank]
            if not connection.poll(TEST_SECONDS):
                errors.append(f"rank {rank}: no result within {TEST_SECONDS} s")
                continue
            try:
                good, value = connection.recv()
            except EOFError:
                errors.append(f"rank {rank} ended")
                continue
            results.append(value) if good else errors.append(f"rank {rank}:\n{value}")
        if errors:
            raise AssertionError("\n".join(errors) + "\n" + self.said())
        return results

    def said(self):
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-4000:]

    def wait(self, seconds=30):
        """Waits for the job's end. Returns (exit code, output)."""
        return self.job.wait(timeout=seconds), self.said()

    def close(self):
        for connection in self.connections.values():
            connection.close()  # ranks end at the end of their input
        try:
            self.job.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.job.kill()
            self.job.wait()
        self.folder.cleanup()


class Pool:
    """The ranks that stay, by their number."""

    def __init__(self):
        self.jobs = {}

    def run(self, size, function):
        """Runs the function on `size` ranks; after an error, the next test gets new ones."""
        if size in self.jobs and self.jobs[size].job.poll() is not None:
            self.jobs.pop(size).close()
        if size not in self.jobs:
            self.jobs[size] = Ranks(size)
        try:
            self.jobs[size].run(function)
        except BaseException:
            self.jobs.pop(size).close()
            raise

    def close(self):
        for job in self.jobs.values():
            job.close()


def on_ranks(*sizes, fresh=False, over=""):
    """Decorates a test function, which gets the group of all ranks. With the transport `over`, they are its own."""

    def decorate(function):
        @pytest.mark.parametrize("size", sizes)
        def test(rank_pool, size):
            if not fresh and not over:
                rank_pool.run(size, function)
                return
            ranks = Ranks(size, ("--transport", over) if over else ())
            try:
                ranks.run(function)
            finally:
                ranks.close()

        test.on_rank = function
        test.__doc__ = function.__doc__
        functools.update_wrapper(test, function, assigned=("__module__", "__name__", "__qualname__"), updated=())
        del test.__wrapped__  # pytest would read its parameters
        return test

    return decorate


@functools.cache
def _module(path):
    sys.path.insert(0, str(pathlib.Path(path).parent))
    specification = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def serve(address):
    """Runs on each rank."""
    import torch

    import lockstep

    torch.set_num_threads(1)
    key = bytes.fromhex(os.environ.pop("RANKS_TEST_KEY"))
    world = lockstep.init()
    connection = multiprocessing.connection.Client(address, authkey=key)  # the tests accept one rank after the other
    connection.send(world.rank)
    while True:
        try:
            path, name, arguments = connection.recv()
        except EOFError:
            return
        try:
            test = getattr(_module(path), name)
            torch.manual_seed(0)
            connection.send((True, getattr(test, "on_rank", test)(world, *arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    sys.modules["ranks"] = sys.modules["__main__"]
    serve(sys.argv[1])
