"""What `lockstep run` says when a rank that runs Python fails, and that nothing is left of the job."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest

PROGRAM = pathlib.Path(__file__).with_name("failing_training.py")
LIMIT_SECONDS = 240  # against hangs


def run(how, optimizer, failing=1, size=2, options=()):
    """Returns the exit code, the output and the words of the FATAL line."""
    words = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", str(size), "--bind", "none", *options, "--"]
    with tempfile.TemporaryDirectory() as folder:  # stacks are written there
        job = subprocess.run(
            [*words, sys.executable, str(PROGRAM), how, str(failing), optimizer],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            cwd=folder,
        )
    fatal = [line for line in job.stdout.splitlines() if line.startswith("FATAL ")]
    found = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', fatal[0])) if fatal else {}
    assert not ranks_left(), job.stdout
    return job.returncode, job.stdout, found


def ranks_left():
    left = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if str(PROGRAM).encode() in (folder / "cmdline").read_bytes().split(b"\0") and folder.name != str(
                os.getpid()
            ):
                left.append(folder.name)
        except OSError:
            continue
    return left


OPTIMIZERS = ("fused", "torch")
# Long enough for the start of a rank on a slow machine.
FAST = ("--hang-timeout", "10", "--stall-timeout", "3")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_rank(optimizer):
    code, output, fatal = run("kill", optimizer)
    assert (fatal["cause"], fatal["rank"], fatal["step"]) == ("RANK_DIED", "1", "3"), output
    assert "SIGKILL" in fatal["detail"], output
    assert code != 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stopped_rank(optimizer):
    _, output, fatal = run("stop", optimizer, options=FAST)
    assert (fatal["cause"], fatal["rank"], fatal["step"]) == ("RANK_STALLED", "1", "3"), output


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rank_that_makes_no_progress(optimizer):
    _, output, fatal = run("loop", optimizer, options=FAST)
    assert (fatal["cause"], fatal["rank"], fatal["step"]) == ("RANK_STUCK", "1", "3"), output


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_desync(optimizer):
    _, output, fatal = run("desync", optimizer)
    assert fatal["cause"] == "DESYNC" and fatal["step"] in ("3", "4"), output  # whichever rank reports it
    assert "accuracy" in fatal["detail"] and "rank 0" in fatal["detail"] and "rank 1" in fatal["detail"], output


def test_desync_in_a_handler_of_all_ranks():
    _, output, fatal = run("handler", "torch", size=3)
    assert fatal["cause"] == "DESYNC" and "accuracy" in fatal["detail"], output


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("failing", (0, 1))
def test_exception(optimizer, failing):
    code, output, fatal = run("exception", optimizer, failing)
    assert (fatal["cause"], fatal["rank"], fatal["step"]) == ("RANK_EXITED", str(failing), "3"), output
    assert "LookupError: no such batch" in fatal["detail"], output
    assert code == 1
    assert 'raise LookupError("no such batch")' in output


def test_clean_up_that_waits_for_the_others_is_not_the_cause():
    code, output, fatal = run("finally", "torch", failing=0, size=3)
    assert (fatal["cause"], fatal["rank"]) == ("RANK_EXITED", "0"), output
    # The second one begins with the name of the operation if rank 0 waits in it when the others find the difference.
    assert re.search(
        r"LookupError: no such batch; then lockstep\.errors\.DesyncError: (barrier#\d+: )?rank", fatal["detail"]
    ), output
    assert code == 1


def test_error_of_a_data_loader_worker():
    _, output, fatal = run("worker", "torch")
    assert (fatal["cause"], fatal["rank"]) == ("RANK_EXITED", "1"), output
    assert re.search(
        r"LookupError.* in DataLoader worker process 0. \(LookupError: no such sample: 0\)", fatal["detail"]
    )


def test_remedy_of_a_known_error():
    _, output, fatal = run("known", "fused")
    assert fatal["hint"].startswith('"lower the batch size'), output


def test_lack_of_memory_has_its_own_code():
    code, output, fatal = run("memory", "torch")
    assert (fatal["cause"], fatal["rank"], code) == ("RESOURCE", "1", 74), output
    assert fatal["hint"] != '""', output


def test_code_of_a_rank_that_is_killed_while_it_ends():
    code, output, fatal = run("slow_end", "torch", options=("--fail-grace", "1"))
    assert (fatal["cause"], fatal["rank"], code) == ("RANK_EXITED", "1", 1), output


@pytest.mark.parametrize(("how", "size"), (("exit", 3), ("slow_exit", 2)))
def test_exit_code(how, size):
    code, output, fatal = run(how, "torch", size=size)
    assert (fatal["cause"], fatal["rank"], code) == ("RANK_EXITED", "1", 3), output
    assert "exited with code 3" in fatal["detail"], output


def test_interrupt_of_the_job():
    words = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", "2", "--bind", "none", "--"]
    with subprocess.Popen(
        [*words, sys.executable, str(PROGRAM), "loop", "1", "torch"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        end = time.monotonic() + LIMIT_SECONDS
        while len(ranks_left()) < 3 and time.monotonic() < end:  # the launcher's command line names the program too
            time.sleep(0.1)
        time.sleep(1)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
    assert not ranks_left()
