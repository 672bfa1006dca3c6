"""Ranks that are asked to stop by a signal, and the processes that they have started."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("stopped_training.py")
LIMIT_SECONDS = 240  # against hangs


def start(size, *words):
    command = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", str(size), "--bind", "none", "--"]
    return subprocess.Popen(
        [*command, sys.executable, str(PROGRAM), *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/tmp",
    )


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize(("number", "code"), ((signal.SIGTERM, 75), (signal.SIGINT, 130)))
def test_all_ranks_save_after_the_same_step(tmp_path, number, code, size):
    job = start(size, "train", tmp_path)
    output = ""
    while output.count("ready\n") < size and (line := job.stdout.readline()):
        output += line
    job.send_signal(number)
    output += job.communicate(timeout=LIMIT_SECONDS)[0]
    assert job.returncode == code, output
    steps = {(tmp_path / str(rank)).read_text() for rank in range(size)}
    assert len(steps) == 1, output


@pytest.mark.parametrize("size", (1, 2, 3))
def test_children_of_a_rank_end_by_sigterm(size):
    job = start(size, "children")
    try:
        output = job.communicate(timeout=LIMIT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    assert job.returncode == 0, output
