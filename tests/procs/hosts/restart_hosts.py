#!/usr/bin/env python3
"""Tests `lockstep run --max-restarts` when it loses hosts, on hosts with sshd that are network namespaces.

Usage: restart_hosts.py --lockstep PATH [--python PATH --package PATH] [CASE...]. The default is all cases. The exit
code is 77 if the machine lacks what they require.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, parse_arguments, wait_until  # noqa: E402

NUM_HOSTS = 3
LIMIT_S = 100
# The ranks of the first start sleep; those of each later one print their place and end.
SCRIPT = (
    "if [ $LOCKSTEP_GENERATION = 0 ]; then echo up; sleep 300; fi; "
    "echo start $LOCKSTEP_GENERATION: $RANK of $WORLD_SIZE on $(hostname)"
)


class Run:
    """A `lockstep run` whose ranks run."""

    def __init__(self, cluster, hosts, *words, used=None):
        self.log = pathlib.Path(cluster.folder, f"err.{time.monotonic_ns()}")
        with open(self.log, "wb") as err:
            self.process = subprocess.Popen(
                [
                    ARGUMENTS.lockstep,
                    "run",
                    "-H",
                    hosts,
                    "--connect-timeout",
                    "2",
                    "--restart-pause",
                    "0.1",
                    *words,
                    "--",
                    "sh",
                    "-c",
                    SCRIPT,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        used = used or [int(host) for host in re.findall(r"h(\d+)", hosts)]
        wait_until(
            lambda: all("sleep 300" in " ".join(cluster.processes(host).values()) for host in used),
            "the ranks do not start",
        )

    def err(self):
        return self.log.read_text(encoding="utf-8")

    def line(self, text, limit_s=30):
        """Blocks until the launcher has written a line with `text`. Returns the line."""
        wait_until(lambda: text in self.err(), f"no line contains {text!r}: {self.err()}", limit_s)
        return next(line for line in self.err().splitlines() if text in line)

    def end(self):
        """Blocks until the job ends. Returns (exit code, sorted lines of ranks that were restarted)."""
        out, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, sorted(line for line in out.splitlines() if "] start " in line)


def kill_agent(cluster, host):
    """Kills the agent of `host`, which ends its ranks."""
    agents = sorted(pid for pid, words in cluster.processes(host).items() if "lockstep agent" in words)
    os.kill(agents[1], signal.SIGKILL)


def min_hosts_continues_without_lost_host(cluster):
    job = Run(cluster, "h1:1,h2:2,h3:1", "--max-restarts", "3", "--min-hosts", "2")
    cluster.cut(2)
    cut = time.monotonic()
    line = job.line("restart 1 of 3")
    check("PEER_UNREACHABLE" in line and "in 10 s on h1, h2, h3;" in line, line)
    code, out = job.end()
    cluster.heal(2)
    check(time.monotonic() - cut >= 10, "the restart waits until the unreachable ranks must have ended")
    check(
        code == 0 and out == ["[h1:0] start 1: 0 of 2 on h1", "[h3:1] start 1: 1 of 2 on h3"],
        f"code {code}: {out} {job.err()[-500:]}",
    )
    check(
        'lockstep: host "h2": ' in job.err()
        and "lockstep: the job continues with 2 ranks on 2 hosts instead of 4 ranks on 3 hosts\n" in job.err(),
        "the smaller world and its reason are reported",
    )
    wait_until(lambda: not cluster.processes(2), "its ranks are left", 20)


def min_hosts_runs_fewer_than_n_ranks(cluster):
    job = Run(cluster, "h1:1,h2:1,h3:2", "-n", "3", "--max-restarts", "1", "--min-hosts", "1")
    cluster.cut(3)
    code, out = job.end()
    cluster.heal(3)
    check(
        code == 0 and out == ["[h1:0] start 1: 0 of 2 on h1", "[h2:1] start 1: 1 of 2 on h2"],
        f"code {code}: {out} {job.err()[-500:]}",
    )


def spare_host_replaces_lost_host(cluster):
    job = Run(cluster, "h1:1,h2:1,h3:1", "-n", "2", "--max-restarts", "1", "--min-hosts", "2", used=(1, 2))
    cluster.cut(2)
    code, out = job.end()
    cluster.heal(2)
    check(
        code == 0 and out == ["[h1:0] start 1: 0 of 2 on h1", "[h3:1] start 1: 1 of 2 on h3"],
        f"code {code}: {out} {job.err()[-500:]}",
    )
    check("continues with" not in job.err(), "the world is as large as before")


def waits_for_all_hosts_without_min_hosts(cluster):
    job = Run(cluster, "h1:1,h2:1", "--max-restarts", "3")
    killed = time.monotonic()
    kill_agent(cluster, 2)
    line = job.line("restart 1 of 3")
    check(
        "INTERNAL on h2: the agent, which monitors the ranks, was killed by SIGKILL" in line
        and "in 10 s on h1, h2;" in line,
        line,
    )
    code, out = job.end()
    check(
        code == 0 and out == ["[h1:0] start 1: 0 of 2 on h1", "[h2:1] start 1: 1 of 2 on h2"],
        f"code {code}: {out} {job.err()[-500:]}",
    )
    check(time.monotonic() - killed >= 10, "the host was not used for 10 s")


def waits_for_unreachable_host(cluster):
    job = Run(cluster, "h1:1,h2:1", "--max-restarts", "5")
    cluster.power_off(2)
    line = job.line("restart 1 of 5")
    check("in 10 s on h1, h2" in line, line)
    line = job.line("restart 2 of 5", 40)
    check('PEER_UNREACHABLE on ctl: host "h2"' in line.replace('\\"', '"') and "in 20 s on h1, h2" in line, line)
    cluster.power_on(2)
    code, out = job.end()
    check(
        code == 0 and out == ["[h1:0] start 2: 0 of 2 on h1", "[h2:1] start 2: 1 of 2 on h2"],
        f"code {code}: {out} {job.err()[-500:]}",
    )


def excludes_host_unreachable_from_peer(cluster):
    job = Run(cluster, "h1:1,h2:1,h3:1", "--max-restarts", "2", "--min-hosts", "2")
    cluster.cut_one_way(1, 3)  # both reach the launcher
    os.kill(next(pid for pid, words in cluster.processes(2).items() if words.startswith("sh -c")), signal.SIGKILL)
    line = job.line("restart 2 of 2")
    check("PEER_UNREACHABLE" in line and "on h1, h2, without h3 (failed recently)" in line, line)
    code, out = job.end()
    cluster.heal_one_way(1, 3)
    check(
        code == 0 and out == ["[h1:0] start 2: 0 of 2 on h1", "[h2:1] start 2: 1 of 2 on h2"],
        f"code {code}: {out} {job.err()[-500:]}",
    )


def hosts_that_train_apart_go_on_without_a_lost_host(cluster):
    """With an outer optimizer, each host keeps what it has learned since the last round."""
    folder = pathlib.Path(cluster.folder, "outer")
    program = pathlib.Path(__file__).resolve().parents[3] / "python/tests/outer_training.py"
    words = [ARGUMENTS.lockstep, "run", "-H", "h1:2,h2:2", "--max-restarts", "2", "--min-hosts", "1", "--restart-pause"]
    words += [
        "0.1",
        "-x",
        f"PYTHONPATH={ARGUMENTS.package}",
        "--",
        ARGUMENTS.python,
        program,
        folder,
        "int8",
        "0",
        "real",
    ]
    folder.mkdir()
    with open(folder / "err", "wb") as err:
        job = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True
        )
    wait_until(lambda: len(list(folder.glob("checkpoints/*"))) > 2, "no checkpoint is saved")
    cluster.cut(2)
    out, _ = job.communicate(timeout=LIMIT_S)
    cluster.heal(2)
    said = (folder / "err").read_text(encoding="utf-8")
    check(job.returncode == 0, f"the job ends with {job.returncode}: {said[-800:]}")
    check("the job continues with 2 ranks on 1 host instead of 4 ranks on 2 hosts" in said, said[-400:])
    steps = {int(step) for step in re.findall(r"resumed from step (\d+)", out)}
    check(len(steps) == 1 and steps.pop() > 0, f"both ranks resume from the same step: {out}")
    weights = [(folder / str(rank)).read_text(encoding="utf-8") for rank in (0, 1)]
    check(weights[0] == weights[1] and "nan" not in weights[0], "they end with equal weights")


CASES = {
    case.__name__: case
    for case in (
        min_hosts_continues_without_lost_host,
        min_hosts_runs_fewer_than_n_ranks,
        spare_host_replaces_lost_host,
        waits_for_all_hosts_without_min_hosts,
        waits_for_unreachable_host,
        excludes_host_unreachable_from_peer,
        hosts_that_train_apart_go_on_without_a_lost_host,
    )
}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep", python="", package="")
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    ssh_cluster.run_cases(CASES, ARGUMENTS.cases, NUM_HOSTS)


main()
