#!/usr/bin/env python3
"""Tests what `lockstep run -H` does when it loses a host, an agent or itself, on hosts with sshd that are namespaces.

Usage: ssh_failures.py --lockstep PATH [--runs N] [CASE...]. The default is all cases except the one of 64 hosts, which
must be run alone. The exit code is 77 if the machine lacks what they require.
"""

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

NUM_HOSTS = 4
MANY_HOSTS = 64
SLEEPERS = ["sh", "-c", "sleep 300 & sleep 300"]  # a rank with a child of its own


def expect_fatal(*words, **expected):
    return ssh_cluster.expect_fatal(ARGUMENTS.lockstep, *words, **expected)


def sorted_lines(out):
    return sorted(out.splitlines())


def start_sleepers(cluster):
    """Starts two ranks on each of two hosts. Returns when all of them and their children sleep."""
    job = LockstepRun(ARGUMENTS.lockstep, "-H", "h1:2,h2:2", *SLEEPERS)
    try:
        wait_until(
            lambda: all(
                sum("sleep 300" in words and "sh -c" not in words for words in cluster.processes(host).values()) == 4
                for host in (1, 2)
            ),
            "the ranks do not start",
        )
    except RuntimeError:
        print({host: cluster.processes(host) for host in range(NUM_HOSTS)}, job.process.poll())
        job.process.kill()
        print(*job.process.communicate())
        raise
    return job


def pids(cluster, host, what):
    """Returns the processes on `host` whose command line contains `what`, as process IDs of this host."""
    return sorted(pid for pid, words in cluster.processes(host).items() if what in words)


def children_of(pid, what):
    """Returns the children of `pid` whose command line contains `what`."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [
        int(child)
        for child in children
        if what in pathlib.Path(f"/proc/{child}/cmdline").read_text(encoding="ascii", errors="replace")
    ]


def expect_end(cluster, job, limit_s, has, code):
    """Waits until the job and all its processes have ended.

    Checks that this takes at most `limit_s`, that the exit code is `code` (any if None), and that the last line of
    stderr contains all of `has`.
    """
    begun = time.monotonic()
    exit_code, _, err = job.end(30)
    reported = time.monotonic() - begun
    line = err.splitlines()[-1] if err else ""
    wait_until(lambda: not any(cluster.processes(host) for host in (1, 2)), "processes are left", 20)
    gone = time.monotonic() - begun
    check(
        gone <= limit_s and (code is None or exit_code == code) and all(text in line for text in has),
        f"reported after {reported:.2f} s, no process left after {gone:.2f} s, code {exit_code}: {line[:250]}",
    )


def rank_killed(cluster):
    job = start_sleepers(cluster)
    os.kill(pids(cluster, 2, "sh -c sleep")[0], signal.SIGKILL)
    # The children of the other ranks get 2 s to end before they are killed.
    expect_end(cluster, job, 5, ["cause=RANK_DIED", "host=h2", "killed by SIGKILL"], 137)


def agent_killed(cluster):
    job = start_sleepers(cluster)
    guard, agent = pids(cluster, 2, "lockstep agent")
    os.kill(agent, signal.SIGKILL)
    expect_end(cluster, job, 10, ["cause=INTERNAL", "host=h2", "was killed by SIGKILL"], 70)
    job = start_sleepers(cluster)
    guard, agent = pids(cluster, 2, "lockstep agent")
    os.kill(guard, signal.SIGKILL)
    expect_end(cluster, job, 10, ["host=h2"], None)


def stopped_agent_ends_with_launcher(cluster):
    job = start_sleepers(cluster)
    os.kill(pids(cluster, 2, "lockstep agent")[1], signal.SIGSTOP)
    job.process.kill()
    expect_end(cluster, job, 10, [], -9)


def ssh_killed(cluster):
    job = start_sleepers(cluster)
    os.kill(children_of(job.process.pid, "h2")[0], signal.SIGKILL)
    expect_end(cluster, job, 10, ["cause=PEER_UNREACHABLE", "host=h2", "ssh was killed by SIGKILL"], 69)


def launcher_killed(cluster):
    job = start_sleepers(cluster)
    job.process.kill()
    expect_end(cluster, job, 10, [], -9)


def link_cut(cluster):
    job = start_sleepers(cluster)
    cluster.cut(2)
    try:
        expect_end(cluster, job, 10, ["cause=PEER_UNREACHABLE", "host=h2", "h2 is unreachable"], 69)
    finally:
        cluster.heal(2)


def launcher_host_powered_off(cluster):
    words = [ARGUMENTS.lockstep, "run", "-H", "h2:2,h3:2"]
    job = subprocess.Popen(
        cluster.command_inside(1, [*words, *SLEEPERS]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(
        lambda: all(sum("sleep 300" in line for line in cluster.processes(host).values()) == 6 for host in (2, 3)),
        "the ranks do not start",
    )
    cluster.power_off(1)
    begun = time.monotonic()
    wait_until(lambda: not any(cluster.processes(host) for host in (2, 3)), "processes are left", 20)
    gone = time.monotonic() - begun
    job.wait(timeout=10)
    check(gone <= 10, f"no process is left on the other hosts after {gone:.2f} s")
    cluster.power_on(1)
    again = subprocess.run(
        cluster.command_inside(1, [*words, "hostname"]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ssh_cluster.RUN_LIMIT_S,
        check=False,
    )
    check(
        again.returncode == 0 and sorted_lines(again.stdout) == ["[h2:0] h2", "[h2:1] h2", "[h3:2] h3", "[h3:3] h3"],
        f"the next start works: {again.stdout} {again.stderr}",
    )


def stopped_launcher_keeps_ranks_running(cluster):
    job = start_sleepers(cluster)
    os.kill(job.process.pid, signal.SIGSTOP)
    time.sleep(8)  # longer than a host may be silent, to check that the launcher does not report it
    left = [sum("sleep 300" in words for words in cluster.processes(host).values()) for host in (1, 2)]
    os.kill(job.process.pid, signal.SIGCONT)
    check(left == [6, 6], f"all processes are alive: {left}")
    os.kill(job.process.pid, signal.SIGINT)
    expect_end(cluster, job, 12, ["cause=INTERRUPTED"], 130)


def unusable_hosts_are_listed(cluster):
    err = expect_fatal(
        "-H", "h1:1,h2:1,nohost:1,h3:1,h4:1,neither:1", "true", code=64, has=["2 of 6 hosts cannot be used", "nohost"]
    )
    reports = [line for line in err.splitlines() if line.startswith("lockstep: host")]
    check(len(reports) == 2 and "nohost" in reports[0] and "neither" in reports[1], "one line per host")
    wait_until(lambda: not any(cluster.processes(host) for host in (1, 2, 3, 4)), "processes run", 5)


def hosts_unreachable_from_each_other(cluster):
    cluster.cut_one_way(1, 2)  # both reach the launcher
    expect_fatal(
        "-H",
        "h1:1,h2:1",
        "true",
        code=69,
        has=['host \\"h1\\" (10.77.0.1, eth0) cannot reach \\"h2\\" (10.77.0.2, eth0)'],
    )
    cluster.heal_one_way(1, 2)


def failures_among_sixty_four_hosts(cluster):
    cluster.introduce()
    everywhere = ["-H", ",".join(f"h{host}:1" for host in range(1, MANY_HOSTS + 1))]
    job = LockstepRun(ARGUMENTS.lockstep, *everywhere, "sh", "-c", "echo $RANK/$WORLD_SIZE $(hostname)")
    code, out, err = job.end()
    expected = [f"[h{1 + rank}:{rank}] {rank}/{MANY_HOSTS} h{1 + rank}" for rank in range(MANY_HOSTS)]
    check(
        code == 0 and sorted_lines(out) == sorted(expected), f"{MANY_HOSTS} hosts after {job.took:.1f} s {err[-300:]}"
    )
    check(all(cluster.connections(host) == 1 for host in range(1, MANY_HOSTS + 1)), "one connection per host")
    # All ranks print when one fails.
    script = "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; [ $RANK.$i = 36.200 ] && exit 9; done; sleep 60"
    err = expect_fatal(*everywhere, "sh", "-c", script, code=9, has=["cause=RANK_EXITED", "rank=36", "host=h37"])
    check(len([line for line in err.splitlines() if "rank=" in line]) == 1, "no other rank is blamed")
    cluster.power_off(17)
    cluster.cut(40)
    err = expect_fatal(
        *everywhere,
        "--connect-timeout",
        15,
        "true",
        code=64,
        has=[f"2 of {MANY_HOSTS} hosts cannot be used", "h17"],
    )
    reports = [line for line in err.splitlines() if line.startswith("lockstep: host")]
    check(len(reports) == 2 and "h17" in reports[0] and "h40" in reports[1], "\n".join(reports))
    wait_until(
        lambda: not any(cluster.processes(host) for host in range(1, MANY_HOSTS + 1) if host != 17),
        "processes run",
        10,
    )


CASES = {
    case.__name__: case
    for case in (
        rank_killed,
        agent_killed,
        stopped_agent_ends_with_launcher,
        ssh_killed,
        launcher_killed,
        link_cut,
        launcher_host_powered_off,
        stopped_launcher_keeps_ranks_running,
        unusable_hosts_are_listed,
        hosts_unreachable_from_each_other,
        failures_among_sixty_four_hosts,
    )
}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep", runs=1)
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    many = failures_among_sixty_four_hosts.__name__
    cases = ARGUMENTS.cases or [name for name in CASES if name != many]
    ssh_cluster.run_cases(CASES, cases, MANY_HOSTS if cases == [many] else NUM_HOSTS, ARGUMENTS.runs)


main()
