#!/usr/bin/env python3
"""Tests `lockstep run` and lockstep::launch() in allocations of a SLURM with two nodes on this machine.

Usage: slurm.py --lockstep PATH --probe PATH_OF_LAUNCH_PROBE [--mnist PATH] [CASE...]. The default is all cases. The
exit code is 77 if the machine lacks what they require.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import fake_mnist  # noqa: E402
import host_cluster  # noqa: E402
import slurm_cluster  # noqa: E402
from checks import check, parse_arguments, wait_until  # noqa: E402

LIMIT_S = 240


def run(cluster, *words, **variables):
    """Runs a command with the configuration of the cluster. Returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        list(map(str, words)),
        env={**cluster.environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def run_ok(cluster, *words, **variables):
    """Runs a command, which must succeed. Returns the sorted lines of its stdout."""
    code, out, err = run(cluster, *words, **variables)
    check(code == 0, f"{' '.join(map(str, words))[:100]}: code {code} {err[-500:] if code else ''}")
    return sorted(out.splitlines())


def run_in(*allocation):
    """Returns the command `lockstep run` in an allocation of its own."""
    return ["salloc", "--quiet", *allocation, ARGUMENTS.lockstep, "run"]


def processes(what):
    """Returns the IDs of processes whose command line contains `what`, except this one and salloc."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if what in words and int(pid) != os.getpid() and not words.startswith(("salloc", sys.executable)):
            found.append(int(pid))
    return sorted(found)


SHOW = [
    "sh",
    "-c",
    "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $SLURMD_NODENAME "
    "${SLURM_PROCID-none}${SLURM_NTASKS-}${SLURM_NPROCS-}${SLURM_STEP_ID-}",
]


def allocation_defines_hosts_and_slots(cluster):
    out = run_ok(cluster, *run_in("-N2", "-n3"), *SHOW)
    check(
        out == ["[n1:0] 0/3 0/2 0 n1 none", "[n1:1] 1/3 1/2 0 n1 none", "[n2:2] 2/3 0/1 1 n2 none"],
        f"an uneven allocation: {out}",
    )
    check(len(run_ok(cluster, *run_in("-N2"), "true", OMP_NUM_THREADS="1")) == 0, "slots are counted without -n")
    check(run_ok(cluster, *run_in("-N2", "-n4"), "-n", 3, *SHOW)[-1] == "[n2:2] 2/3 0/1 1 n2 none", "-n is the total")
    check(
        run_ok(cluster, *run_in("-N2", "-n4"), "-H", "n2:1", *SHOW) == ["[0] 0/1 0/1 0 n2 none"],
        "-H can select hosts of the allocation",
    )


def runs_in_batch_script(cluster):
    script = pathlib.Path(cluster.folder, "job.sh")
    script.write_text(f"#!/bin/sh\n{ARGUMENTS.lockstep} run -- {' '.join(SHOW[:2])} '{SHOW[2]}'\n", encoding="ascii")
    log = pathlib.Path(cluster.folder, "job.log")
    check(run_ok(cluster, "sbatch", "--wait", "--parsable", "-N2", "-n4", "-o", log, script) != [], "the job succeeds")
    check(
        sorted(log.read_text(encoding="ascii").splitlines())
        == [
            "[n1:0] 0/4 0/2 0 n1 none",
            "[n1:1] 1/4 1/2 0 n1 none",
            "[n2:2] 2/4 0/2 1 n2 none",
            "[n2:3] 3/4 1/2 1 n2 none",
        ],
        "the host of the script needs no srun",
    )


def allocation_can_be_ignored(cluster):
    check(
        run_ok(cluster, *run_in("-N2", "-n4"), "--env-from", "none", "-n", 1, "sh", "-c", "echo $WORLD_SIZE")
        == ["[0] 1"],
        "--env-from none",
    )
    code, _, err = run(cluster, ARGUMENTS.lockstep, "run", "--env-from", "slurm", "true")
    check(code == 64 and "SLURM_JOB_NODELIST are not set" in err, err)
    code, _, err = run(cluster, "salloc", "--quiet", "-n3", "srun", ARGUMENTS.lockstep, "run", "true")
    check(code == 64 and "srun has started lockstep run 3 times" in err, err.splitlines()[0])


def errors_are_reported(cluster):
    code, _, err = run(cluster, *run_in("-N2", "-n2"), "--remote-path", "/nowhere/lockstep", "true")
    check(code == 64 and "no such program" in err and 'host \\"n1\\"' in err, err.splitlines()[-1])
    code, _, err = run(cluster, *run_in("-N2", "-n2"), "sh", "-c", "[ $RANK = 0 ] && sleep 60; exit 7")
    check(code == 7 and "cause=RANK_EXITED rank=1 host=n2" in err, err.splitlines()[-1])


def output_is_complete(cluster):
    out = run_ok(
        cluster,
        *run_in("-N2", "-n4"),
        "sh",
        "-c",
        "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; head -c 300000 /dev/zero | tr '\\0' x",
    )
    check(len([line for line in out if len(line) < 20]) == 12000, "12000 lines")
    check(sum(line.count("x") for line in out) == 4 * 300000, "output without a newline")


def doctor_checks_allocated_nodes(cluster):
    code, out, err = run(
        cluster, "salloc", "--quiet", "-N2", "-n2", ARGUMENTS.lockstep, "doctor", "--json", "/bin/true"
    )
    found = {(one["host"], one["check"]): one for one in json.loads(out)["findings"]}
    bad = [one for one in found.values() if one["state"] == "bad"]
    check(code == 0 and not bad, f"no bad findings: {bad} {err}")
    for where, what, has in (
        ("n1", "reached", "through srun"),
        ("n2", "reached", "through srun"),
        ("n2", "program", "/bin/true"),
        ("n1 - n2", "speed", "Gb/s"),
    ):
        check(has in found[where, what]["value"], f"{where}: {found[where, what]['value']}")


def launch_starts_ranks_on_each_node_of_step(cluster):
    out = run_ok(
        cluster, "srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", ARGUMENTS.probe, "launch", 3, "a b"
    )
    check(out == [f"[n{1 + rank // 3}:{rank}] rank {rank}: <a b>" for rank in range(6)], str(out))
    code, out, err = run(
        cluster, "srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", ARGUMENTS.probe, "launch", 2, "fail"
    )
    check(code == 9 and "cause=RANK_EXITED rank=1 host=n1" in err, err[-300:])
    out = run_ok(cluster, "srun", "-N2", "--ntasks-per-node=2", ARGUMENTS.probe, "launch", 3, "x")
    check(out == ["rank none: <x>"] * 4, f"{out}: tasks that are ranks")
    wait_until(lambda: not processes("lockstep agent"), "agents are left")


def signal_to_all_processes_is_handled_by_ranks(cluster):
    script = (
        "trap 'touch signalled.$RANK; while [ ! -e go ]; do sleep 0.1; done; echo handled; exit 0' USR1; "
        "touch ready.$RANK; while :; do sleep 0.1; done"
    )
    job = subprocess.Popen(
        [*run_in("-N2", "-n2"), "--cwd", cluster.folder, "sh", "-c", script],
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: all((cluster.folder / f"ready.{rank}").exists() for rank in (0, 1)), "the ranks do not run")
    agents = processes("lockstep agent")
    subprocess.run(
        ["scancel", "-s", "USR1", cluster.run_client("squeue", "-h", "-o", "%i")], env=cluster.environment, check=True
    )
    wait_until(
        lambda: all((cluster.folder / f"signalled.{rank}").exists() for rank in (0, 1)), "the ranks have no signal"
    )
    check(len(agents) >= 3 and processes("lockstep agent") == agents, f"agents and their guards keep running: {agents}")
    (cluster.folder / "go").touch()
    out, err = job.communicate(timeout=LIMIT_S)
    check(
        job.returncode == 0 and sorted(out.splitlines()) == ["[n1:0] handled", "[n2:1] handled"],
        f"code {job.returncode} {out} {err}",
    )


def sleepers():
    return [pid for pid in processes("sleep 300") if pid not in processes("lockstep")]


def start_sleepers(cluster):
    job = subprocess.Popen(
        [*run_in("-N2", "-n4"), "sh", "-c", "sleep 300 & sleep 300"],
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(sleepers()) == 12, "the ranks do not run")
    return job


def expect_end(job, limit_s, has):
    """Waits until the job and all its processes have ended. Its last line of stderr must contain all of `has`."""
    _, err = job.communicate(timeout=LIMIT_S)
    wait_until(lambda: not sleepers() and not processes("lockstep agent"), "processes are left", limit_s)
    line = err.splitlines()[-1] if err else ""
    check(all(text in line for text in has), f"no process is left: {line[:250]}")


def no_processes_left_after_any_death(cluster):
    job = start_sleepers(cluster)
    os.kill(next(pid for pid in processes("sh -c sleep 300") if pid in sleepers()), signal.SIGKILL)
    expect_end(job, 5, ["cause=RANK_DIED", "killed by SIGKILL"])
    job = start_sleepers(cluster)
    os.kill(processes("lockstep agent")[-1], signal.SIGKILL)
    expect_end(job, 10, ["FATAL", "host=n"])
    job = start_sleepers(cluster)
    os.kill(processes("--nodelist=n2")[0], signal.SIGKILL)
    expect_end(job, 10, ["FATAL", "host=n2"])
    job = start_sleepers(cluster)
    os.kill(processes("lockstep run")[0], signal.SIGKILL)
    expect_end(job, 10, [])
    job = start_sleepers(cluster)
    check(
        cluster.run_client("squeue", "-h", "-o", "%i").isdigit()
        and subprocess.run(
            ["scancel", cluster.run_client("squeue", "-h", "-o", "%i")], env=cluster.environment, check=True
        ).returncode
        == 0,
        "scancel",
    )
    expect_end(job, 10, [])


def mnist_losses_match(cluster):
    folder = pathlib.Path(cluster.folder)
    fake_mnist.write(folder, 400)
    losses = {}
    training = [ARGUMENTS.mnist, "--data", folder, "--epochs", 2, "--batch-size", 40, "--loss-log"]
    for name, words in (
        ("one", [ARGUMENTS.lockstep, "run", "-n", 4, "--transport", "tcp"]),
        ("run", [*run_in("-N2", "-n4"), "--transport", "tcp"]),
        ("srun", ["srun", "-N2", "-n4"]),
    ):
        log = folder / f"losses.{name}"
        run_ok(cluster, *words, *training, log, LOCKSTEP_TRANSPORT="tcp")
        losses[name] = [float(line) for line in log.read_text(encoding="ascii").splitlines()]
    for name in ("run", "srun"):
        difference = max(abs(a - b) for a, b in zip(losses["one"], losses[name], strict=True))
        check(
            len(losses["one"]) == 20 and difference <= 1e-5,
            f"{len(losses['one'])} losses on one host and by {name} on two differ by {difference:.2e}",
        )


def trainer_starts_its_ranks(cluster):
    """A program with Trainer({.nodes = 2, .devices = 2}), under salloc, srun, submit, and on one host."""
    folder = pathlib.Path(cluster.folder)

    def words(name, nodes):
        (folder / name).mkdir()
        places = [f"folder={folder / name}", f"history={folder / name}"]
        return [ARGUMENTS.training, "model=mlp", "plain=1", "steps=20", f"nodes={nodes}", "devices=2", *places]

    ends = {}
    starts = {
        "host": [ARGUMENTS.lockstep, "run", "-n", 4],
        "salloc": ["salloc", "--quiet", "-N2", "-n4"],
        "srun": ["srun", "-N2", "--ntasks-per-node=1"],
        "submit": [ARGUMENTS.lockstep, "submit", "--nodes=2", "--ranks-per-node=2", "--follow", f"--output={folder}"],
    }
    for name, start in starts.items():
        separator = ["--"] if name == "submit" else []
        out = run_ok(cluster, *start, *separator, *words(name, 1 if name == "host" else 2))
        ends[name] = [line[line.index("end=") :] for line in out if "end=" in line]
        records = sorted(path.name for path in (folder / name).glob("rank.*.jsonl"))
        check(len(records) == 4 and len(ends[name]) == 1, f"{name}: {records} {ends[name]}")
    check(len({re.sub("hash=.*", "", one[0]) for one in ends.values()}) == 1, f"the losses are equal: {ends}")


CASES = {
    case.__name__: case
    for case in (
        allocation_defines_hosts_and_slots,
        runs_in_batch_script,
        allocation_can_be_ignored,
        errors_are_reported,
        output_is_complete,
        doctor_checks_allocated_nodes,
        launch_starts_ranks_on_each_node_of_step,
        signal_to_all_processes_is_handled_by_ranks,
        no_processes_left_after_any_death,
        mnist_losses_match,
        trainer_starts_its_ranks,
    )
}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep", probe="", mnist="", training="")
    host_cluster.enter_sandbox((*slurm_cluster.TOOLS, "salloc", "srun", "scancel"))
    with tempfile.TemporaryDirectory() as folder:
        cluster = slurm_cluster.SlurmCluster(folder)
        for name in ARGUMENTS.cases or CASES:
            print(f"-- {name}", flush=True)
            CASES[name](cluster)
        cluster.close()


main()
