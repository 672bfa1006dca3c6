#!/usr/bin/env python3
"""Tests what `lockstep status` prints about jobs on several hosts, on hosts with sshd that are network namespaces.

Usage: status.py --lockstep PATH --probe PATH [--runs N] [CASE...]. The default is all cases. The exit code is 77 if the
machine lacks what they require.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, parse_arguments, wait_until  # noqa: E402
from ssh_cluster import LockstepRun  # noqa: E402

NUM_HOSTS = 2
SILENCE_LIMIT_S = 2.5  # the launcher waits 1 s for its agents


def status(*options, inside=lambda words: words):
    """Runs `lockstep status`. Returns its stdout and how long it took. `inside` changes the command."""
    begun = time.monotonic()
    ended = subprocess.run(
        inside([ARGUMENTS.lockstep, "status", *options]), capture_output=True, text=True, timeout=20, check=True
    )
    if ended.stderr:
        check(False, f"an error: {ended.stderr}")
    return ended.stdout, time.monotonic() - begun


def ranks(**options):
    """Returns what `lockstep status` prints about each rank."""
    return [json.loads(line) for line in status("--json", **options)[0].splitlines()]


def states():
    return [rank["state"] for rank in ranks()]


def start(script, hosts="h1:1,h2:2", name="several"):
    """Starts a job whose ranks run `script`. Returns when all of them run."""
    job = LockstepRun(ARGUMENTS.lockstep, "-H", hosts, "--name", name, "--", "sh", "-c", script)
    wait_until(lambda: len(states()) == 3, "the ranks do not start", 20)
    return job


def end(job):
    job.process.send_signal(signal.SIGTERM)
    job.end()


def ranks_of_all_hosts_are_listed(cluster):
    script = f"[ $RANK = 1 ] && exec {ARGUMENTS.probe} {cluster.folder} 1 1 hold; exec sleep 300"
    job = start(script)
    wait_until(lambda: states() == ["running", "stopped", "running"], "the probe does not stop itself", 20)
    found = ranks()
    check([rank["rank"] for rank in found] == [0, 1, 2], "all ranks")
    check([rank["host"] for rank in found] == ["h1", "h2", "h2"], f"their hosts: {found}")
    check([rank["initialized"] for rank in found] == [False, True, False], "which of them use Lockstep")
    check(found[1]["transport"] == "probe" and found[1]["step"] == 0, "the page of a rank of another host")
    for rank, command in zip(found, ("sleep", "procs_restart_p", "sleep"), strict=True):
        number = int(rank["host"][1:])
        check(cluster.run_on_host(number, "cat", f"/proc/{rank['pid']}/comm").strip() == command, f"pid of {command}")
        check(0 < rank["resident_bytes"] < 1 << 30, f"{rank['resident_bytes']} bytes are resident")
        check(rank["name"] == "several" and rank["launcher_host"] == "ctl", "name of the job and host of its launcher")
        check(rank["launcher_pid"] == job.process.pid, "pid of the launcher")
    wait_until(lambda: [rank["cpu_percent"] for rank in ranks()] == [0, 0, 0], "ranks that sleep use CPU time", 20)
    text, _ = status()
    check(f"job several (lockstep run with pid {job.process.pid}): 3 of 3 ranks on 2 hosts\n" in text, text)
    rows = [line.split() for line in text.splitlines()[2:5]]
    check([row[:3] for row in rows] == [[str(r["rank"]), r["host"], str(r["pid"])] for r in found], "columns")
    end(job)


def host_with_an_agent_lists_its_ranks(cluster):
    job = start("exec sleep 300")
    found = ranks(inside=lambda words: cluster.command_inside(2, words))
    check([(rank["rank"], rank["host"]) for rank in found] == [(1, "h2"), (2, "h2")], f"ranks 1 and 2: {found}")
    check({rank["launcher_host"] for rank in found} == {"ctl"}, "the launcher's host")
    text, _ = status(inside=lambda words: cluster.command_inside(2, words))
    heading = f"job several (lockstep run with pid {job.process.pid} on ctl): 2 of 3 ranks on this host\n"
    check(text.startswith(heading), text)
    end(job)
    text, _ = status(inside=lambda words: cluster.command_inside(2, words))
    check(text == "no ranks of this user on this host\n", text)


def silent_agent_does_not_block_status(cluster):
    job = start("exec sleep 300")
    agent = sorted(pid for pid, words in cluster.processes(2).items() if "lockstep agent" in words)[1]
    os.kill(agent, signal.SIGSTOP)
    for _ in range(3):
        text, took = status()
        check(took < SILENCE_LIMIT_S, f"status took {took:.2f} s")
        rows = [line.split(maxsplit=3) for line in text.splitlines()[2:5]]
        check([row[1] for row in rows] == ["h1", "h2", "h2"], f"hosts: {text}")
        check("running" in rows[0][3], "the rank of the host that replies")
        check(all(row[3].endswith("unknown: its host has not replied") for row in rows[1:]), "ranks of the other host")
    check(states() == ["running", "unknown", "unknown"], "states in JSON")
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: states() == ["running"] * 3, "the agent does not reply again", 10)
    end(job)


def ranks_of_a_host_that_has_finished_are_exited(cluster):
    job = start("[ $RANK = 0 ] && exec sleep 2; exec sleep 300")
    wait_until(lambda: states() == ["exited", "running", "running"], "rank 0 does not exit", 20)
    wait_until(lambda: not cluster.processes(1), "the agent of h1 does not end", 20)
    check(states() == ["exited", "running", "running"], "states after the end of the agent")
    end(job)


CASES = {
    case.__name__: case
    for case in (
        ranks_of_all_hosts_are_listed,
        host_with_an_agent_lists_its_ranks,
        silent_agent_does_not_block_status,
        ranks_of_a_host_that_has_finished_are_exited,
    )
}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep", "probe", runs=1)
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    ssh_cluster.run_cases(CASES, ARGUMENTS.cases, NUM_HOSTS, ARGUMENTS.runs)


main()
