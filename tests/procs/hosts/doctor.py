#!/usr/bin/env python3
"""Tests the findings of `lockstep doctor` on hosts with sshd, which are network namespaces.

Usage: doctor.py --lockstep PATH [CASE...]. The default is all cases. The exit code is 77 if the machine lacks what
they require.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, parse_arguments, wait_until  # noqa: E402

NUM_HOSTS = 5
LIMIT_S = 100
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
TORCH = '{"python": "3.11.2", "torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}'


def run(*words, **variables):
    """Runs `lockstep doctor`. Returns (exit code, stdout, stderr)."""
    begun = time.monotonic()
    done = subprocess.run(
        [ARGUMENTS.lockstep, "doctor", *map(str, words)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(f"took {time.monotonic() - begun:.1f} s", flush=True)
    return done.returncode, done.stdout, done.stderr


def findings(*words, code, **variables):
    """Runs `lockstep doctor`, which must exit with `code`. Returns {(host, check): finding}."""
    got, out, err = run("--json", *words, **variables)
    found = json.loads(out) if out else {"findings": []}
    for one in found["findings"]:
        if one["state"] != "ok":
            print(f"   {one}")
    check(got == code and not err, f"code {got} {err}")
    check(found["bad"] == sum(one["state"] == "bad" for one in found["findings"]), "the number of bad findings")
    return {(one["host"], one["check"]): one for one in found["findings"]}


def expect_finding(found, host, what, state, has, remedy):
    finding = found.get((host, what), {})
    good = (
        finding.get("state") == state and all(text in finding["value"] for text in has) and remedy in finding["remedy"]
    )
    check(good, f"{host}, {what}: {finding}")


def script(path, text):
    path = pathlib.Path(path)
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="ascii")
    path.chmod(0o755)
    return path


def make_training_script(cluster):
    """Creates a Python script and a fake interpreter with a version of torch. Returns the path of the script."""
    python = script(f"{cluster.folder}/py/python3", f"echo '{TORCH}'\n")
    train = script(f"{cluster.folder}/app/train", "")
    train.write_text(f"#!{python}\nprint(1)\n", encoding="ascii")
    return train


def eight_faults_are_reported(cluster):
    if not os.path.exists(FAKETIME):
        host_cluster.skip("libfaketime is not installed (Debian: faketime)")
    train = make_training_script(cluster)
    cluster.run_on_host(4, "mount", "-t", "tmpfs", "tmpfs", train.parent)
    other = pathlib.Path(cluster.folder, "other")
    shutil.copy(ARGUMENTS.lockstep, other)
    subprocess.run(["objcopy", "--remove-section", ".note.gnu.build-id", other], check=True)
    cluster.run_on_host(5, "mount", "--bind", other, ARGUMENTS.lockstep)
    older = script(f"{cluster.folder}/older/python3", "echo '" + TORCH.replace("2.11.0", "2.10.0") + "'\n")
    cluster.run_on_host(2, "mount", "--bind", older, f"{cluster.folder}/py/python3")
    cluster.run_on_host(2, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")
    cluster.run_on_host(2, "dd", "if=/dev/zero", "of=/dev/shm/left", "bs=64k", "count=1")
    script(f"{cluster.folder}/old_driver/nvidia-smi", "echo 'Tesla T4, 15360, 470.57.02'\n")
    late = script(
        f"{cluster.folder}/late",
        f"PATH={cluster.folder}/old_driver:$PATH LD_PRELOAD={FAKETIME} FAKETIME=+1h DONT_FAKE_MONOTONIC=1 "
        f'FAKETIME_DONT_FAKE_MONOTONIC=1 exec {ARGUMENTS.lockstep} "$@"\n',
    )
    names = pathlib.Path(cluster.folder, "names")
    names.write_text("127.0.0.1 localhost\n127.0.1.1 h4\n", encoding="ascii")
    cluster.run_on_host(4, "mount", "--bind", names, "/etc/hosts")
    cluster.cut_one_way(1, 2)
    hosts = pathlib.Path(cluster.folder, "machines")
    hosts.write_text(f"h1\nh2\nh3 path={late}\nh4\nh5\n", encoding="ascii")
    try:
        found = findings("--hostfile", hosts, train, code=1)
        code, table, _ = run("--hostfile", hosts, train)
    finally:
        cluster.heal_one_way(1, 2)
        cluster.run_on_host(2, "umount", "/dev/shm")
        cluster.run_on_host(2, "umount", "-l", f"{cluster.folder}/py/python3")
        cluster.run_on_host(4, "umount", "-l", train.parent)
        cluster.run_on_host(4, "umount", "/etc/hosts")
        cluster.run_on_host(5, "umount", "-l", ARGUMENTS.lockstep)
    print(table)
    expect_finding(found, "h4", "program", "bad", [str(train), "No such file"], "copy it to the same path on this host")
    expect_finding(found, "h5", "lockstep", "bad", ["lockstep there is build"], "install the same build there")
    expect_finding(
        found, "h2", "Python", "bad", ["2.10.0+cu130", "h1 has 2.11.0+cu130"], "-m pip install torch==2.11.0"
    )
    expect_finding(
        found, "h3", "driver", "bad", ["470.57.02 is too old for CUDA 13.0", "580"], "update NVIDIA's driver"
    )
    expect_finding(found, "h4", "name", "warn", ["h4 resolves to 127.0.1.1", "10.77.0.4 (eth0)"], "/etc/hosts")
    expect_finding(found, "h2", "/dev/shm", "bad", ["full"], "df -h /dev/shm")
    expect_finding(found, "h3", "clock", "bad", ["ahead of this host's"], "set-ntp")
    check(abs(float(found["h3", "clock"]["value"].split()[0]) - 3600) < 20, "an hour")
    expect_finding(found, "h1 - h2", "connect", "bad", ["h1 cannot reach 10.77.0.2"], "firewall")
    injected = {
        ("h4", "program"),
        ("h5", "lockstep"),
        ("h2", "Python"),
        ("h3", "driver"),
        ("h2", "/dev/shm"),
        ("h3", "clock"),
        ("h1 - h2", "connect"),
    }
    check({key for key, one in found.items() if one["state"] == "bad"} == injected, "nothing else is bad")
    check(code == 1 and all(text in table for text in ("BAD", "-> ", "7 bad")), "the table has the same findings")
    check(all(not cluster.processes(host) for host in range(1, NUM_HOSTS + 1)), "no process is left")


def healthy_hosts_have_no_bad_findings(cluster):
    found = findings("-H", "h1,h2", make_training_script(cluster), code=0)
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
        and "per step for 250 MB" in found["all", "network"]["value"],
        found["all", "network"]["value"],
    )
    code, out, err = run("-H", "h1,h2", ARGUMENTS.lockstep, "status")
    check(code == 0 and "libraries" in out and not err, out)
    check("libraries   ok" in out and "not found" not in out, "a program's libraries")
    check(all(len(line) <= 80 for line in out.splitlines() if "/" not in line), "80 columns")


def python_environments_are_compared(cluster):
    """A real interpreter whose packages differ between the hosts."""
    environment, other = (pathlib.Path(cluster.folder, name) for name in ("env", "other_env"))
    for one in (environment, other):
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", one], check=True)
    packages = next(environment.glob("lib/python3*/site-packages"))

    def plant(folder, name, version, text=""):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
        information = folder / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (information / "top_level.txt").write_text(name + "\n")

    torch = (
        "__version__ = '2.11.0'\nclass version: cuda = None\nclass cuda: is_available = staticmethod(lambda: False)\n"
    )
    on_two = pathlib.Path(cluster.folder, "packages of h2")
    for folder, numpy in ((packages, "1.26.4"), (on_two, "2.1.0")):
        plant(folder, "torch", "2.11.0", torch)
        plant(folder, "numpy", numpy)
    plant(packages, "einops", "0.8.0")
    train = pathlib.Path(cluster.folder, "train.py")
    train.write_text("import os, torch\nimport numpy as np\nfrom einops import rearrange\n")
    cluster.run_on_host(2, "mount", "--bind", on_two, packages)
    python = environment / "bin/python3"
    try:
        found = findings("-H", "h1,h2,h3", python, "-u", train, code=1, VIRTUAL_ENV=str(other))
    finally:
        cluster.run_on_host(2, "umount", "-l", packages)
    has = ["numpy is 2.1.0, h1 has 1.26.4", "einops is not installed, h1 has 0.8.0"]
    expect_finding(found, "h2", "packages", "bad", has, f"for {python}")
    expect_finding(found, "h1", "packages", "ok", ["einops 0.8.0, numpy 1.26.4"], "")
    expect_finding(found, "h1", "environment", "warn", [str(environment), str(other)], f"start {other}/bin/python")
    check(found["h3", "packages"]["state"] == "ok" and found["h2", "Python"]["state"] == "ok", "nothing else is bad")


def unreachable_host_does_not_stop_others(cluster):
    cluster.cut(3)
    found = findings("-H", "nohost,h1,h3", "--connect-timeout", 2, code=1)
    cluster.heal(3)
    expect_finding(found, "nohost", "reached", "bad", ["unknown host"], "/etc/hosts")
    expect_finding(found, "h3", "reached", "bad", ["h3"], "")
    expect_finding(found, "h1", "interface", "ok", ["eth0 10.77.0.1"], "")
    found = findings("-H", "ctl,h1", "/nowhere/train", code=1)
    expect_finding(found, "ctl", "program", "bad", ["/nowhere/train: No such file"], "copy it")


def dead_agent_is_reported(cluster):
    train = make_training_script(cluster)
    deadly = script(f"{cluster.folder}/deadly/python3", "kill -9 $PPID\n")
    cluster.run_on_host(2, "mount", "--bind", deadly, f"{cluster.folder}/py/python3")
    found = findings("-H", "h1,h2", train, code=1)
    cluster.run_on_host(2, "umount", "-l", f"{cluster.folder}/py/python3")
    expect_finding(found, "h2", "agent", "bad", ["exited before it replied"], "run lockstep doctor again")
    expect_finding(found, "h1", "Python", "ok", ["2.11.0"], "")


def killed_doctor_leaves_no_processes(cluster):
    train = make_training_script(cluster)
    script(f"{cluster.folder}/py/python3", "sleep 300 & sleep 300\n")
    doctor = subprocess.Popen(
        [ARGUMENTS.lockstep, "doctor", "-H", "h1,h2", train],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for host in (1, 2):
        wait_until(
            lambda host=host: sum("sleep 300" in words for words in cluster.processes(host).values()) == 2,
            "the doctor does not run Python",
        )
    doctor.kill()
    doctor.wait(10)
    begun = time.monotonic()
    wait_until(lambda: not any(cluster.processes(host) for host in (1, 2)), "processes are left", 10)
    check(True, f"no process left after {time.monotonic() - begun:.2f} s")


def gigabit_network_is_detected(cluster):
    cluster.shape("1gbit", (1, 2))
    found = findings("-H", "h1,h2", "--model-bytes", "100M", code=0)
    cluster.unshape((1, 2))
    expect_finding(
        found,
        "all",
        "network",
        "warn",
        ["this is a gigabit network", "per step for 100 MB", "80 ms at 10 Gb/s", "on one host", "every 8 steps"],
        "average_hosts_every",
    )


def mpi_installation_is_checked(cluster):
    if not ssh_cluster.has_mpirun() or not shutil.which("orted"):
        host_cluster.skip("Open MPI is not installed (Debian: openmpi-bin)")
    orted, mpirun = (os.path.realpath(shutil.which(name)) for name in ("orted", "mpirun"))
    found = findings("--mpi", "-H", "h1,h2", code=0)
    expect_finding(found, "h1", "MPI", "ok", ["orted of Open MPI "], "")
    other = script(f"{cluster.folder}/mpirun", "echo 'mpirun (Open MPI) 3.0.1'\n")
    cluster.run_on_host(2, "mount", "--bind", other, mpirun)
    found = findings("--mpi", "-H", "h1,h2", code=1)
    expect_finding(found, "h2", "MPI", "bad", ["belongs to Open MPI 3.0.1", "mpirun here"], "mpirun --prefix DIR")
    cluster.run_on_host(2, "umount", mpirun)
    cluster.run_on_host(2, "mount", "--bind", "/dev/null", orted)
    found = findings("--mpi", "-H", "h1,h2", code=1)
    cluster.run_on_host(2, "umount", orted)
    expect_finding(found, "h2", "MPI", "bad", ["no orted"], "mpirun --prefix DIR")


CASES = {
    case.__name__: case
    for case in (
        eight_faults_are_reported,
        healthy_hosts_have_no_bad_findings,
        python_environments_are_compared,
        unreachable_host_does_not_stop_others,
        dead_agent_is_reported,
        killed_doctor_leaves_no_processes,
        gigabit_network_is_detected,
        mpi_installation_is_checked,
    )
}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep")
    ARGUMENTS.lockstep = os.path.abspath(ARGUMENTS.lockstep)
    host_cluster.enter_sandbox((*ssh_cluster.TOOLS, "objcopy"))
    ssh_cluster.run_cases(CASES, ARGUMENTS.cases, NUM_HOSTS)


main()
