#!/usr/bin/env python3
"""Tests how `lockstep run -H` starts ranks on hosts with sshd, each a network namespace, and what it passes to them.

Usage: ssh.py --lockstep PATH [--python PATH] [--mnist PATH] [--runs N] [CASE...]. The default is all cases. The exit
code is 77 if the machine lacks what they require.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from random import Random

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import fake_mnist  # noqa: E402
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, parse_arguments  # noqa: E402
from ssh_cluster import LockstepRun  # noqa: E402

NUM_HOSTS = 4


def run(*words, **options):
    """Runs `lockstep run`. Returns (exit code, stdout, stderr)."""
    return LockstepRun(ARGUMENTS.lockstep, *words, **options).end()


def run_ok(*words, **options):
    """Runs `lockstep run`, which must succeed. Returns its stdout."""
    code, out, err = run(*words, **options)
    check(code == 0, f"{' '.join(map(str, words))[:80]}: code {code} {err[-400:] if code else ''}")
    return out


def expect_fatal(*words, **expected):
    return ssh_cluster.expect_fatal(ARGUMENTS.lockstep, *words, **expected)


def sorted_lines(out):
    return sorted(out.splitlines())


# Where ranks run.


def ranks_are_contiguous_per_host(cluster):
    before = [cluster.connections(host) for host in (1, 2)]
    out = run_ok(
        "-H",
        "h1:2,h2:1,h1:1",
        "--",
        "sh",
        "-c",
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $(hostname) $MASTER_ADDR $GLOO_SOCKET_IFNAME",
    )
    check(
        sorted_lines(out)
        == [
            "[h1:0] 0/4 0/3 0 h1 10.77.0.1 eth0",
            "[h1:1] 1/4 1/3 0 h1 10.77.0.1 eth0",
            "[h1:2] 2/4 2/3 0 h1 10.77.0.1 eth0",
            "[h2:3] 3/4 0/1 1 h2 10.77.0.1 eth0",
        ],
        out,
    )
    check([cluster.connections(host) for host in (1, 2)] == [before[0] + 1, before[1] + 1], "one connection per host")


def launcher_host_runs_ranks(cluster):
    out = run_ok("-H", "ctl:1,h2:1", "--", "sh", "-c", "echo $RANK $(hostname) $MASTER_ADDR")
    check(sorted_lines(out) == ["[ctl:0] 0 ctl 10.77.0.254", "[h2:1] 1 h2 10.77.0.254"], out)


def n_is_total_over_hosts(cluster):
    check(
        sorted_lines(run_ok("-n", 3, "-H", "h1:2,h2:2,h3:2", "hostname")) == ["[h1:0] h1", "[h1:1] h1", "[h2:2] h2"],
        "-n fills hosts in order",
    )
    expect_fatal("-n", 7, "-H", "h1:2,h2:2", "true", code=64, has=["-n is 7, but the hosts have 4 slots"])


def hostfile_equals_host_list(cluster):
    path = f"{cluster.folder}/machines"
    pathlib.Path(path).write_text(
        f"# two\nh1 slots=1 user=root port=22\n10.77.0.2:1 path={ARGUMENTS.lockstep}  # by number\n", encoding="ascii"
    )
    check(
        sorted_lines(run_ok("--hostfile", path, "hostname")) == ["[10.77.0.2:1] h2", "[h1:0] h1"],
        "a host file, with a comment, options and an address",
    )
    pathlib.Path(path).write_text("h1\nh2 slts=4\n", encoding="ascii")
    expect_fatal("--hostfile", path, "true", code=65, has=["machines:2:4: ", "slts=4"])
    expect_fatal("--hostfile", "/nowhere", "true", code=64, has=['--hostfile is \\"/nowhere\\": No such file'])


def working_directory_and_program_path(cluster):
    folder = pathlib.Path(cluster.folder, "deep er")
    folder.mkdir()
    script = folder / "prog"
    script.write_text("#!/bin/sh\necho $PWD\n", encoding="ascii")
    script.chmod(0o755)
    check(
        sorted_lines(run_ok("-H", "h1:1,h2:1", "./prog", cwd=folder)) == [f"[h1:0] {folder}", f"[h2:1] {folder}"],
        "the shell's directory, a relative program",
    )
    check(
        sorted_lines(run_ok("-H", "h1:1,h2:1", "--cwd", "deep er", "./prog", cwd=cluster.folder))
        == [f"[h1:0] {folder}", f"[h2:1] {folder}"],
        "--cwd",
    )
    expect_fatal(
        "-H",
        "h1:1,h2:1",
        "--cwd",
        "/nowhere",
        "true",
        code=64,
        has=['cannot change to directory \\"/nowhere\\"', "host=h"],
    )
    expect_fatal(
        "-H",
        "h1:1,h2:1",
        "/nowhere/prog",
        code=64,
        has=['program \\"/nowhere/prog\\": No such file or directory', "host=h"],
    )


# What ranks inherit.


def special_arguments(count):
    """Returns `count` arguments that a shell or an encoding may change."""
    random = Random(4)
    words = r"""' " \ $HOME $(id) `id` * ~ !! #x && | -x -- = a=b %s%n '"'"' \\' $'\n' {a,b}"""
    special = ["", " ", "a\nb", "\t", "\r\n", ";rm -rf /", "\u00fc\u4e2d\U0001f600", "\x7f\x01", "x" * 100_000]
    fixed = [*words.split(" "), *special]
    alphabet = "ab'\"\\$`!*?[]{}()<>|;&#~= \t\n\r\u00e9\u4e2d\U0001f680%^-"
    while len(fixed) < count:
        fixed.append("".join(random.choice(alphabet) for _ in range(random.randrange(1, 60))))
    return fixed[:count]


def arguments_and_environment_are_unchanged(cluster):
    words = special_arguments(200)
    target = f"{cluster.folder}/got"
    env = {f"LOCKSTEP_TEST_{index}": word for index, word in enumerate(words)}
    exported = {f"ALSO_{index}": word for index, word in enumerate(words)}
    dump = (
        "import json, os, sys; code = lambda text: text.encode('utf-8', 'surrogateescape').hex(); "
        "found = [list(map(code, sys.argv[1:])), {name: code(value) for name, value in os.environ.items()}]; "
        f"json.dump(found, open({target!r} + os.environ['RANK'], 'w'))"
    )
    exports = [word for name, value in exported.items() for word in ("-x", f"{name}={value}")]
    run_ok("-H", "h1:1,h2:1", *exports, "--", sys.executable, "-c", dump, *words, env=env)
    for rank in (0, 1):
        arguments, variables = json.loads(pathlib.Path(target + str(rank)).read_text(encoding="ascii"))
        equal = [bytes.fromhex(one).decode() for one in arguments] == words
        kept = sum(
            bytes.fromhex(variables.get(name, "")).decode() == value for name, value in {**env, **exported}.items()
        )
        check(equal and kept == 400, f"rank {rank}: 200 arguments, {kept} of 400 variables")


def secrets_are_not_forwarded(cluster):
    script = "echo ${TORCH_TOKEN-none} ${MY_PASSWORD-none} ${HOME_GROWN-none}"
    env = {"TORCH_TOKEN": "t", "MY_PASSWORD": "p", "HOME_GROWN": "h"}
    check(
        sorted_lines(run_ok("-H", "h1:1,h2:1", "sh", "-c", script, env=env))
        == ["[h1:0] none none none", "[h2:1] none none none"],
        "only listed variables are forwarded",
    )
    check(
        sorted_lines(run_ok("-H", "h1:1,h2:1", "-x", "HOME_GROWN", "sh", "-c", script, env=env))
        == ["[h1:0] none none h", "[h2:1] none none h"],
        "-x NAME",
    )


def same_python_on_all_hosts(cluster):
    venv = f"{cluster.folder}/venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    out = run_ok(
        "-H",
        "h1:1,h2:1",
        "python",
        "-c",
        "import sys, os; print(sys.executable, sys.prefix, os.environ['VIRTUAL_ENV'])",
        env={"VIRTUAL_ENV": venv, "PATH": f"{venv}/bin:{os.environ['PATH']}"},
    )
    check(
        sorted_lines(out) == [f"[h1:0] {venv}/bin/python {venv} {venv}", f"[h2:1] {venv}/bin/python {venv} {venv}"], out
    )


def gpu_list_per_host(cluster):
    script = "echo $CUDA_VISIBLE_DEVICES $LOCAL_RANK"
    check(
        sorted_lines(run_ok("-H", "h1:2,h2:1", "sh", "-c", script, env={"CUDA_VISIBLE_DEVICES": "4,5"}))
        == ["[h1:0] 4,5 0", "[h1:1] 4,5 1", "[h2:2] 4,5 0"],
        "a list in the environment of the launcher",
    )
    check(
        sorted_lines(run_ok("-H", "h1:2,h2:1", "--gpus", "6,7", "--isolate-gpus", "sh", "-c", script))
        == ["[h1:0] 6 0", "[h1:1] 7 1", "[h2:2] 6 0"],
        "--isolate-gpus",
    )
    check(
        sorted_lines(run_ok("-H", "h1:2,h2:1", "sh", "-c", script))
        == ["[h1:0] 70,71,72,73 0", "[h1:1] 70,71,72,73 1", "[h2:2] 70,71,72,73 0"],
        "the list of the login on each host",
    )
    expect_fatal(
        "-H", "h1:2,h2:3", "--gpus", "6,7", "true", code=64, has=['host \\"h2\\" has 2 GPUs in its list for 3 ranks']
    )


# Output.


def output_lines_and_files_are_complete(cluster):
    folder = f"{cluster.folder}/logs"
    script = "i=0; while [ $i -lt 2000 ]; do echo line $i of $RANK; i=$((i+1)); done; echo last >&2"
    code, out, err = run("-H", "h1:2,h2:2", "--output", folder, "sh", "-c", script)
    check(code == 0 and len(out.splitlines()) == 8000 and err.count("last") == 4, "8000 lines")
    places = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
    for rank, host in places.items():
        shown = [line for line in out.splitlines() if line.startswith(f"[{host}:{rank}] ")]
        check(
            shown == [f"[{host}:{rank}] line {i} of {rank}" for i in range(2000)], f"lines of rank {rank} are in order"
        )
        check(
            len(pathlib.Path(folder, f"rank.{rank}.out").read_text(encoding="ascii").splitlines()) == 2000,
            "its file on the host of the launcher",
        )


# Errors that are reported per host, before a rank runs.


def duplicate_host_is_rejected(cluster):
    expect_fatal(
        "-H", "h1:1,10.77.0.1:1", "true", code=64, has=['host \\"10.77.0.1\\": it is the same machine as \\"h1\\"']
    )


def ssh_errors_are_explained(cluster):
    expect_fatal("-H", "h1:1,nohost:1", "true", code=64, has=['host \\"nohost\\": unknown host'])
    machines = pathlib.Path(cluster.folder, "ports")
    machines.write_text("h1:1\nh2:1 port=2\n", encoding="ascii")
    expect_fatal("--hostfile", machines, "true", code=64, has=['host \\"h2\\": connection refused'])
    cluster.configure_ssh(
        f"Host k2\nHostName h2\nHostKeyAlias h2\nUserKnownHostsFile {cluster.folder}/ssh/known\n"
        "IdentityFile /dev/null\nIdentitiesOnly yes\n"
        f"Host u2\nHostName h2\nHostKeyAlias other\nUserKnownHostsFile {cluster.folder}/ssh/known\n"
    )
    expect_fatal("-H", "h1:1,k2:1", "true", code=64, has=['host \\"k2\\": the key was rejected'])
    expect_fatal("-H", "h1:1,u2:1", "true", code=64, has=['host \\"u2\\": its host key is unknown'])
    cluster.configure_ssh()
    expect_fatal(
        "-H",
        "h1:1,h2:1",
        "--remote-path",
        "/nowhere/lockstep",
        "true",
        code=64,
        has=['there is no program \\"/nowhere/lockstep\\"'],
    )
    noisy = pathlib.Path(cluster.folder, "noisy")
    noisy.write_text(
        f"#!/bin/sh\necho Welcome, the weather is fine today\nexec {ARGUMENTS.lockstep} agent --guarded\n",
        encoding="ascii",
    )
    noisy.chmod(0o755)
    expect_fatal(
        "-H",
        "h1:1",
        "--remote-path",
        noisy,
        "true",
        code=64,
        has=['host \\"h1\\": the output there is not from lockstep', ".bashrc"],
    )
    cluster.cut(3)
    begun = time.monotonic()
    expect_fatal("-H", "h1:1,h3:1", "--connect-timeout", 2, "true", code=64, has=['host \\"h3\\": no'])
    check(time.monotonic() - begun < 6, "within the connect timeout")
    cluster.heal(3)


def different_build_and_missing_library(cluster):
    other = pathlib.Path(cluster.folder, "other")
    shutil.copy(ARGUMENTS.lockstep, other)
    subprocess.run(["objcopy", "--remove-section", ".note.gnu.build-id", other], check=True)
    cluster.run_on_host(2, "mount", "--bind", other, ARGUMENTS.lockstep)
    expect_fatal("-H", "h1:1,h2:1", "true", code=64, has=['host \\"h2\\": lockstep there is build'])
    cluster.run_on_host(2, "umount", "-l", ARGUMENTS.lockstep)
    library = next(
        line.split()[2]
        for line in subprocess.run(
            ["ldd", ARGUMENTS.lockstep], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        if "libstdc++" in line
    )
    cluster.run_on_host(2, "mount", "--bind", "/dev/null", os.path.realpath(library))
    expect_fatal(
        "-H", "h1:1,h2:1", "true", code=64, has=['host \\"h2\\": a shared library is missing there', "libstdc++"]
    )
    cluster.run_on_host(2, "umount", "-l", os.path.realpath(library))


def interface_selection(cluster):
    for host in (1, 2):
        host_cluster.sh("ip", "-n", f"h{host}", "link", "add", "docker0", "type", "bridge")
        host_cluster.sh("ip", "-n", f"h{host}", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host_cluster.sh("ip", "-n", f"h{host}", "link", "set", "docker0", "up")
    show = ["sh", "-c", "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME ${LOCKSTEP_INTERFACE-}"]
    check(
        sorted_lines(run_ok("-H", "h1:1,h2:1", *show)) == ["[h1:0] 10.77.0.1 eth0", "[h2:1] 10.77.0.1 eth0"],
        "the interface that routes to the launcher",
    )
    for choice in ("eth0", "10.77.0.0/24", "^docker0"):
        check(
            sorted_lines(run_ok("-H", "h1:1,h2:1", "--interface", choice, *show))
            == ["[h1:0] 10.77.0.1 eth0 eth0", "[h2:1] 10.77.0.1 eth0 eth0"],
            choice,
        )
    host_cluster.sh("ip", "-n", "h1", "addr", "add", "10.77.0.101/24", "dev", "eth0")  # two addresses match
    check(
        sorted_lines(run_ok("-H", "h1:1,h2:1", "--interface", "10.77.0.0/24", "sh", "-c", "sleep 0.5; echo $RANK"))
        == ["[h1:0] 0", "[h2:1] 1"],
        "a host with two addresses",
    )
    host_cluster.sh("ip", "-n", "h1", "addr", "del", "10.77.0.101/24", "dev", "eth0")
    expect_fatal("-H", "h1:1,h2:1", "--interface", "docker0", *show, code=69, has=["cannot reach", "172.17.0.1"])
    expect_fatal(
        "-H",
        "h1:1,h2:1",
        "--interface",
        "ib0",
        *show,
        code=69,
        has=['none of its addresses matches --interface \\"ib0\\"; its addresses are eth0 10.77.0.1, docker0'],
    )
    check(
        sorted_lines(
            run_ok("-H", "h1:1,h2:1", "sh", "-c", "echo $GLOO_SOCKET_IFNAME", env={"GLOO_SOCKET_IFNAME": "docker0"})
        )
        == ["[h1:0] docker0", "[h2:1] docker0"],
        "a user's value is kept",
    )
    expect_fatal(
        "-H",
        "h1:1,h2:1",
        "true",
        env={"GLOO_SOCKET_IFNAME": "eth7"},
        code=64,
        has=['GLOO_SOCKET_IFNAME is \\"eth7\\"', "eth0"],
    )


# Complete programs.


def torch_distributed_runs_unmodified(cluster):
    if not ARGUMENTS.python:
        host_cluster.skip("there is no Python with torch (scripts/setup.sh)")
    script = pathlib.Path(__file__).resolve().parents[2] / "support/torch_all_reduce.py"
    out = run_ok("-H", "h1:2,h2:1", ARGUMENTS.python, script)
    check(len(sorted_lines(out)) == 3, out)


def mnist_losses_match(cluster):
    folder = pathlib.Path(cluster.folder)
    fake_mnist.write(folder, 400)
    losses = {}
    for name, hosts in (("one", "h1:4"), ("two", "h1:2,h2:2")):
        log = folder / f"losses.{name}"
        run_ok(
            "-H",
            hosts,
            "--transport",
            "tcp",
            ARGUMENTS.mnist,
            "--data",
            folder,
            "--epochs",
            2,
            "--batch-size",
            40,
            "--loss-log",
            log,
        )
        losses[name] = [float(line) for line in log.read_text(encoding="ascii").splitlines()]
    difference = max(abs(a - b) for a, b in zip(losses["one"], losses["two"], strict=True))
    check(
        len(losses["one"]) == 20 and difference <= 1e-5,
        f"{len(losses['one'])} losses on one host and on two differ by {difference:.2e}",
    )


CASES = {
    case.__name__: case
    for case in (
        ranks_are_contiguous_per_host,
        launcher_host_runs_ranks,
        n_is_total_over_hosts,
        hostfile_equals_host_list,
        working_directory_and_program_path,
        arguments_and_environment_are_unchanged,
        secrets_are_not_forwarded,
        same_python_on_all_hosts,
        gpu_list_per_host,
        output_lines_and_files_are_complete,
        duplicate_host_is_rejected,
        ssh_errors_are_explained,
        different_build_and_missing_library,
        interface_selection,
        torch_distributed_runs_unmodified,
        mnist_losses_match,
    )
}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep", python="", mnist="", runs=1)
    host_cluster.enter_sandbox((*ssh_cluster.TOOLS, "objcopy"))
    ssh_cluster.run_cases(CASES, ARGUMENTS.cases, NUM_HOSTS, ARGUMENTS.runs)


main()
