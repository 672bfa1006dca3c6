#!/usr/bin/env python3
"""`lockstep doctor` on hosts with sshd, as network namespaces: what was planted is named, with what to do, and nothing else is.

doctor.py --lockstep PATH CASE...; without cases all. Exit code 77: skipped.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402

NUM_HOSTS = 5
LIMIT_S = 100
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
TORCH = '{"python": "3.11.2", "torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}'


def check(good, text):
    print(("ok: " if good else "FAILED: ") + text, flush=True)
    if not good:
        raise SystemExit(1)


def run(*words):
    begun = time.monotonic()
    done = subprocess.run(
        [ARGUMENTS.lockstep, "doctor", *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(f"took {time.monotonic() - begun:.1f} s", flush=True)
    return done.returncode, done.stdout, done.stderr


def findings(*words, code):
    """{(host, check): finding} of a doctor that must end with `code`."""
    got, out, err = run("--json", *words)
    found = json.loads(out) if out else {"findings": []}
    for one in found["findings"]:
        if one["state"] != "ok":
            print(f"   {one}")
    check(got == code and not err, f"code {got} {err}")
    check(found["bad"] == sum(one["state"] == "bad" for one in found["findings"]), "the number of bad ones")
    return {(one["host"], one["check"]): one for one in found["findings"]}


def named(found, host, what, state, has, remedy):
    one = found.get((host, what), {})
    good = one.get("state") == state and all(text in one["value"] for text in has) and remedy in one["remedy"]
    check(good, f"{host}, {what}: {one}")


def script(path, text):
    path = pathlib.Path(path)
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="ascii")
    path.chmod(0o755)
    return path


def make_training_script(bed):
    """A program that is a script of Python, and an interpreter that knows what torch it has."""
    python = script(f"{bed.folder}/py/python3", f"echo '{TORCH}'\n")
    train = script(f"{bed.folder}/app/train", "")
    train.write_text(f"#!{python}\nprint(1)\n", encoding="ascii")
    return train


def eight_faults_are_reported(bed):
    if not os.path.exists(FAKETIME):
        host_cluster.skip("libfaketime is not installed (Debian: faketime)")
    train = make_training_script(bed)
    bed.run_on_host(4, "mount", "-t", "tmpfs", "tmpfs", train.parent)
    other = pathlib.Path(bed.folder, "other")
    shutil.copy(ARGUMENTS.lockstep, other)
    subprocess.run(["objcopy", "--remove-section", ".note.gnu.build-id", other], check=True)
    bed.run_on_host(5, "mount", "--bind", other, ARGUMENTS.lockstep)
    older = script(f"{bed.folder}/older/python3", "echo '" + TORCH.replace("2.11.0", "2.10.0") + "'\n")
    bed.run_on_host(2, "mount", "--bind", older, f"{bed.folder}/py/python3")
    bed.run_on_host(2, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")
    bed.run_on_host(2, "dd", "if=/dev/zero", "of=/dev/shm/left", "bs=64k", "count=1")
    script(f"{bed.folder}/old_driver/nvidia-smi", "echo 'Tesla T4, 15360, 470.57.02'\n")
    late = script(
        f"{bed.folder}/late",
        f'PATH={bed.folder}/old_driver:$PATH LD_PRELOAD={FAKETIME} FAKETIME=+1h DONT_FAKE_MONOTONIC=1 FAKETIME_DONT_FAKE_MONOTONIC=1 exec {ARGUMENTS.lockstep} "$@"\n',
    )
    names = pathlib.Path(bed.folder, "names")
    names.write_text("127.0.0.1 localhost\n127.0.1.1 h4\n", encoding="ascii")
    bed.run_on_host(4, "mount", "--bind", names, "/etc/hosts")
    bed.cut_one_way(1, 2)
    hosts = pathlib.Path(bed.folder, "machines")
    hosts.write_text(f"h1\nh2\nh3 path={late}\nh4\nh5\n", encoding="ascii")
    try:
        found = findings("--hostfile", hosts, train, code=1)
        code, table, _ = run("--hostfile", hosts, train)
    finally:
        bed.heal_one_way(1, 2)
        bed.run_on_host(2, "umount", "/dev/shm")
        bed.run_on_host(2, "umount", "-l", f"{bed.folder}/py/python3")
        bed.run_on_host(4, "umount", "-l", train.parent)
        bed.run_on_host(4, "umount", "/etc/hosts")
        bed.run_on_host(5, "umount", "-l", ARGUMENTS.lockstep)
    print(table)
    named(found, "h4", "program", "bad", [str(train), "No such file"], "copy it to this host")
    named(found, "h5", "lockstep", "bad", ["another build"], "install the same one there")
    named(found, "h2", "Python", "bad", ["2.10.0+cu130", "h1 has 2.11.0+cu130"], "-m pip install torch==2.11.0")
    named(found, "h3", "driver", "bad", ["470.57.02 is too old for CUDA 13.0", "580"], "update NVIDIA's driver")
    named(found, "h4", "name", "warn", ["h4 is 127.0.1.1", "10.77.0.4 (eth0)"], "/etc/hosts")
    named(found, "h2", "/dev/shm", "bad", ["full"], "df -h /dev/shm")
    named(found, "h3", "clock", "bad", ["ahead of this host's"], "set-ntp")
    check(abs(float(found["h3", "clock"]["value"].split()[0]) - 3600) < 20, "an hour")
    named(found, "h1 - h2", "connect", "bad", ["h1 does not reach 10.77.0.2"], "firewall")
    planted = {
        ("h4", "program"),
        ("h5", "lockstep"),
        ("h2", "Python"),
        ("h3", "driver"),
        ("h2", "/dev/shm"),
        ("h3", "clock"),
        ("h1 - h2", "connect"),
    }
    check({key for key, one in found.items() if one["state"] == "bad"} == planted, "and nothing else is bad")
    check(code == 1 and all(text in table for text in ("BAD", "-> ", "7 bad")), "the table says so too")
    check(all(not bed.processes(host) for host in range(1, NUM_HOSTS + 1)), "nobody is left")


def healthy_hosts_have_no_bad_findings(bed):
    found = findings("-H", "h1,h2", make_training_script(bed), code=0)
    checks = {
        "reached",
        "lockstep",
        "free port",
        "clock",
        "name",
        "interface",
        "cores",
        "memory",
        "/dev/shm",
        "memlock",
        "open files",
        "huge pages",
        "program",
        "Python",
        "GPUs",
        "NCCL",
    }
    check(all((host, what) in found for host in ("h1", "h2") for what in checks), "a line for each host and check")
    check(all(found["h1", what]["state"] == "ok" for what in checks), "all good")
    check(
        "Gb/s, round trip" in found["h1 - h2", "speed"]["value"]
        and "a step for 250 MB" in found["all", "network"]["value"],
        found["all", "network"]["value"],
    )
    code, out, err = run("-H", "h1,h2", ARGUMENTS.lockstep, "status")
    check(code == 0 and "libraries" in out and not err, out)
    check("libraries   ok" in out and "not found" not in out, "a program's libraries")
    check(all(len(line) <= 80 for line in out.splitlines() if "/" not in line), "80 columns")


def unreachable_host_does_not_stop_others(bed):
    bed.cut(3)
    found = findings("-H", "nohost,h1,h3", "--connect-timeout", 2, code=1)
    bed.heal(3)
    named(found, "nohost", "reached", "bad", ["unknown host"], "/etc/hosts")
    named(found, "h3", "reached", "bad", ["h3"], "")
    named(found, "h1", "interface", "ok", ["eth0 10.77.0.1"], "")
    found = findings("-H", "ctl,h1", "/nowhere/train", code=1)
    named(found, "ctl", "program", "bad", ["/nowhere/train: No such file"], "copy it")


def dead_agent_is_reported(bed):
    train = make_training_script(bed)
    deadly = script(f"{bed.folder}/deadly/python3", "kill -9 $PPID\n")
    bed.run_on_host(2, "mount", "--bind", deadly, f"{bed.folder}/py/python3")
    found = findings("-H", "h1,h2", train, code=1)
    bed.run_on_host(2, "umount", "-l", f"{bed.folder}/py/python3")
    named(found, "h2", "agent", "bad", ["ended before it answered"], "Ask again")
    named(found, "h1", "Python", "ok", ["2.11.0"], "")


def killed_doctor_leaves_no_processes(bed):
    train = make_training_script(bed)
    script(f"{bed.folder}/py/python3", "sleep 300 & sleep 300\n")
    doctor = subprocess.Popen(
        [ARGUMENTS.lockstep, "doctor", "-H", "h1,h2", train],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for host in (1, 2):
        ssh_cluster.until(
            lambda host=host: sum("sleep 300" in words for words in bed.processes(host).values()) == 2,
            "Python is not asked",
        )
    doctor.kill()
    doctor.wait(10)
    took = ssh_cluster.until(lambda: not any(bed.processes(host) for host in (1, 2)), "processes are left", 10)
    check(True, f"gone after {took:.2f} s")


def gigabit_network_is_detected(bed):
    bed.shape("1gbit", (1, 2))
    found = findings("-H", "h1,h2", "--model-bytes", "100M", code=0)
    bed.unshape((1, 2))
    named(
        found,
        "all",
        "network",
        "warn",
        ["this is a gigabit network", "a step for 100 MB", "at 10 Gb/s 80 ms", "on one host", "every 8 steps"],
        "average_hosts_every",
    )


def mpi_installation_is_checked(bed):
    if not ssh_cluster.has_mpirun() or not shutil.which("orted"):
        host_cluster.skip("Open MPI is not installed (Debian: openmpi-bin)")
    orted, mpirun = (os.path.realpath(shutil.which(name)) for name in ("orted", "mpirun"))
    found = findings("--mpi", "-H", "h1,h2", code=0)
    named(found, "h1", "MPI", "ok", ["orted of Open MPI "], "")
    other = script(f"{bed.folder}/mpirun", "echo 'mpirun (Open MPI) 3.0.1'\n")
    bed.run_on_host(2, "mount", "--bind", other, mpirun)
    found = findings("--mpi", "-H", "h1,h2", code=1)
    named(found, "h2", "MPI", "bad", ["is of Open MPI 3.0.1", "mpirun here"], "mpirun --prefix DIR")
    bed.run_on_host(2, "umount", mpirun)
    bed.run_on_host(2, "mount", "--bind", "/dev/null", orted)
    found = findings("--mpi", "-H", "h1,h2", code=1)
    bed.run_on_host(2, "umount", orted)
    named(found, "h2", "MPI", "bad", ["no orted"], "mpirun --prefix DIR")


CASES = {
    case.__name__: case
    for case in (
        eight_faults_are_reported,
        healthy_hosts_have_no_bad_findings,
        unreachable_host_does_not_stop_others,
        dead_agent_is_reported,
        killed_doctor_leaves_no_processes,
        gigabit_network_is_detected,
        mpi_installation_is_checked,
    )
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("cases", nargs="*")
    global ARGUMENTS
    ARGUMENTS = parser.parse_args()
    ARGUMENTS.lockstep = os.path.abspath(ARGUMENTS.lockstep)
    host_cluster.enter_sandbox((*ssh_cluster.TOOLS, "objcopy"))
    with tempfile.TemporaryDirectory() as folder:
        bed = ssh_cluster.SshCluster(NUM_HOSTS, folder)
        for name in ARGUMENTS.cases or CASES:
            print(f"-- {name}", flush=True)
            CASES[name](bed)


main()
