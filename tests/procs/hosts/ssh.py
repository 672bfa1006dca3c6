#!/usr/bin/env python3
"""`lockstep run -H` on hosts with sshd, as network namespaces.

ssh.py --lockstep PATH [--python PATH] [--mnist PATH] [--runs N] CASE...; without cases all but the one of 64 hosts, which is for itself. Exit code 77: skipped.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from random import Random

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import digits  # noqa: E402
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from ssh_cluster import until  # noqa: E402

NUM_HOSTS = 4
MANY = 64
LIMIT_S = 60


def check(good, text):
    print(("ok: " if good else "FAILED: ") + text, flush=True)
    if not good:
        raise SystemExit(1)


class Run:
    """A `lockstep run` that goes on."""

    def __init__(self, *words, env=None, cwd=None):
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [ARGUMENTS.lockstep, "run", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )

    def end(self, limit_s=LIMIT_S):
        """(exit code, stdout, stderr)"""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            print(out, err)
            raise
        self.took = time.monotonic() - self.begun
        return self.process.returncode, out, err


def run(*words, **options):
    return Run(*words, **options).end()


def good(*words, **options):
    code, out, err = run(*words, **options)
    check(code == 0, f"{' '.join(map(str, words))[:80]}: code {code} {err[-400:] if code else ''}")
    return out


def fatal(*words, code, has, **options):
    """The FATAL line of a run that must end with `code` and say all of `has`."""
    got, _, err = run(*words, **options)
    line = err.splitlines()[-1] if err else ""
    check(got == code and line.startswith("FATAL") and all(text in line for text in has), f"code {got}: {line[:300]}")
    return err


def lines(out):
    return sorted(out.splitlines())


# Where ranks run, and with what.


def ranks_are_contiguous_per_host(bed):
    before = [bed.connections(host) for host in (1, 2)]
    out = good(
        "-H",
        "h1:2,h2:1,h1:1",
        "--",
        "sh",
        "-c",
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $(hostname) $MASTER_ADDR $GLOO_SOCKET_IFNAME",
    )
    check(
        lines(out)
        == [
            "[h1:0] 0/4 0/3 0 h1 10.77.0.1 eth0",
            "[h1:1] 1/4 1/3 0 h1 10.77.0.1 eth0",
            "[h1:2] 2/4 2/3 0 h1 10.77.0.1 eth0",
            "[h2:3] 3/4 0/1 1 h2 10.77.0.1 eth0",
        ],
        out,
    )
    check([bed.connections(host) for host in (1, 2)] == [before[0] + 1, before[1] + 1], "one connection a host")


def launcher_host_runs_ranks(bed):
    out = good("-H", "ctl:1,h2:1", "--", "sh", "-c", "echo $RANK $(hostname) $MASTER_ADDR")
    check(lines(out) == ["[ctl:0] 0 ctl 10.77.0.254", "[h2:1] 1 h2 10.77.0.254"], out)


def n_is_total_over_hosts(bed):
    check(
        lines(good("-n", 3, "-H", "h1:2,h2:2,h3:2", "hostname")) == ["[h1:0] h1", "[h1:1] h1", "[h2:2] h2"],
        "-n fills hosts in order",
    )
    fatal("-n", 7, "-H", "h1:2,h2:2", "true", code=64, has=["-n is 7, but the hosts have 4 slots"])


def hostfile_equals_host_list(bed):
    path = f"{bed.folder}/machines"
    pathlib.Path(path).write_text(
        f"# two\nh1 slots=1 user=root port=22\n10.77.0.2:1 path={ARGUMENTS.lockstep}  # by number\n", encoding="ascii"
    )
    check(lines(good("--hostfile", path, "hostname")) == ["[10.77.0.2:1] h2", "[h1:0] h1"], "a host file")
    pathlib.Path(path).write_text("h1\nh2 slts=4\n", encoding="ascii")
    fatal("--hostfile", path, "true", code=65, has=["machines:2:4: ", "slts=4"])
    fatal("--hostfile", "/nowhere", "true", code=64, has=['--hostfile is \\"/nowhere\\": No such file'])


def working_directory_and_program_path(bed):
    folder = pathlib.Path(bed.folder, "deep er")
    folder.mkdir()
    script = folder / "prog"
    script.write_text("#!/bin/sh\necho $PWD\n", encoding="ascii")
    script.chmod(0o755)
    check(
        lines(good("-H", "h1:1,h2:1", "./prog", cwd=folder)) == [f"[h1:0] {folder}", f"[h2:1] {folder}"],
        "the shell's directory, a relative program",
    )
    check(
        lines(good("-H", "h1:1,h2:1", "--cwd", "deep er", "./prog", cwd=bed.folder))
        == [f"[h1:0] {folder}", f"[h2:1] {folder}"],
        "--cwd",
    )
    fatal(
        "-H",
        "h1:1,h2:1",
        "--cwd",
        "/nowhere",
        "true",
        code=64,
        has=['cannot enter the directory \\"/nowhere\\"', "host=h"],
    )
    fatal(
        "-H", "h1:1,h2:1", "/nowhere/prog", code=64, has=['program \\"/nowhere/prog\\": cannot be executed', "host=h"]
    )


# What ranks get.


def special_arguments(count):
    random = Random(4)
    fixed = [
        "",
        " ",
        "'",
        '"',
        "\\",
        "$HOME",
        "$(id)",
        "`id`",
        "a\nb",
        "\t",
        "*",
        "~",
        "!!",
        "#x",
        ";rm -rf /",
        "&&",
        "|",
        "-x",
        "--",
        "=",
        "a=b",
        "\u00fc\u4e2d\U0001f600",
        "\x7f\x01",
        "%s%n",
        "x" * 100_000,
        "'\"'\"'",
        "\\\\'",
        "$'\\n'",
        "{a,b}",
        "\r\n",
    ]
    alphabet = "ab'\"\\$`!*?[]{}()<>|;&#~= \t\n\r\u00e9\u4e2d\U0001f680%^-"
    while len(fixed) < count:
        fixed.append("".join(random.choice(alphabet) for _ in range(random.randrange(1, 60))))
    return fixed[:count]


def arguments_and_environment_are_unchanged(bed):
    words = special_arguments(200)
    target = f"{bed.folder}/got"
    env = {f"LOCKSTEP_TEST_{index}": word for index, word in enumerate(words)}
    big = {f"ALSO_{index}": word for index, word in enumerate(words)}
    dump = (
        f"import json,os,sys; r=os.environ['RANK']; "
        f"json.dump([[w.encode('utf-8','surrogateescape').hex() for w in sys.argv[1:]], {{k: v.encode('utf-8','surrogateescape').hex() for k, v in os.environ.items()}}], open({target!r}+r,'w'))"
    )
    exports = [word for name, value in big.items() for word in ("-x", f"{name}={value}")]
    good("-H", "h1:1,h2:1", *exports, "--", sys.executable, "-c", dump, *words, env=env)
    for rank in (0, 1):
        arguments, variables = json.loads(pathlib.Path(target + str(rank)).read_text(encoding="ascii"))
        same = [bytes.fromhex(one).decode() for one in arguments] == words
        kept = sum(bytes.fromhex(variables.get(name, "")).decode() == value for name, value in {**env, **big}.items())
        check(same and kept == 400, f"rank {rank}: 200 arguments, {kept} of 400 variables")


def secrets_are_not_forwarded(bed):
    script = "echo ${TORCH_TOKEN-none} ${MY_PASSWORD-none} ${HOME_GROWN-none}"
    env = {"TORCH_TOKEN": "t", "MY_PASSWORD": "p", "HOME_GROWN": "h"}
    check(
        lines(good("-H", "h1:1,h2:1", "sh", "-c", script, env=env))
        == ["[h1:0] none none none", "[h2:1] none none none"],
        "only what is listed travels",
    )
    check(
        lines(good("-H", "h1:1,h2:1", "-x", "HOME_GROWN", "sh", "-c", script, env=env))
        == ["[h1:0] none none h", "[h2:1] none none h"],
        "-x NAME",
    )


def same_python_on_all_hosts(bed):
    venv = f"{bed.folder}/venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    out = good(
        "-H",
        "h1:1,h2:1",
        "python",
        "-c",
        "import sys, os; print(sys.executable, sys.prefix, os.environ['VIRTUAL_ENV'])",
        env={"VIRTUAL_ENV": venv, "PATH": f"{venv}/bin:{os.environ['PATH']}"},
    )
    check(lines(out) == [f"[h1:0] {venv}/bin/python {venv} {venv}", f"[h2:1] {venv}/bin/python {venv} {venv}"], out)


def gpu_list_per_host(bed):
    script = "echo $CUDA_VISIBLE_DEVICES $LOCAL_RANK"
    check(
        lines(good("-H", "h1:2,h2:1", "sh", "-c", script, env={"CUDA_VISIBLE_DEVICES": "4,5"}))
        == ["[h1:0] 4,5 0", "[h1:1] 4,5 1", "[h2:2] 4,5 0"],
        "an outer list",
    )
    check(
        lines(good("-H", "h1:2,h2:1", "--gpus", "6,7", "--isolate-gpus", "sh", "-c", script))
        == ["[h1:0] 6 0", "[h1:1] 7 1", "[h2:2] 6 0"],
        "--isolate-gpus",
    )
    check(
        lines(good("-H", "h1:2,h2:1", "sh", "-c", script))
        == ["[h1:0] 70,71,72,73 0", "[h1:1] 70,71,72,73 1", "[h2:2] 70,71,72,73 0"],
        "the login's own",
    )
    fatal("-H", "h1:2,h2:3", "--gpus", "6,7", "true", code=64, has=['host \\"h2\\" has 2 GPUs in its list for 3 ranks'])


def ship_stages_missing_files(bed):
    folder = pathlib.Path(bed.folder, "only here")
    folder.mkdir()
    program = folder / "my train"
    program.write_text('#!/bin/sh\necho "$0" $RANK "$1"\n', encoding="ascii")
    program.chmod(0o755)
    homes = {}
    for host in (1, 2):
        homes[host] = bed.run_on_host(host, "sh", "-c", "echo $HOME").strip() or "/root"
        bed.run_on_host(host, "mount", "-t", "tmpfs", "tmpfs", folder)  # which hides it
        bed.run_on_host(host, "mount", "-t", "tmpfs", "tmpfs", homes[host] if homes[host] != "/" else "/root")
        bed.run_on_host(host, "mount", "--bind", "/dev/null", ARGUMENTS.lockstep)
    for _ in range(2):  # the second time it is there
        out = lines(good("-H", "h1:1,h2:1", "--ship", "--cwd", "/", program, "a b"))
        check(
            len(out) == 2
            and out[0].startswith("[h1:0] ")
            and out[0].endswith("/program 0 a b")
            and "/.cache/lockstep/" in out[0],
            str(out),
        )
    listed = bed.run_on_host(2, "find", homes[2] if homes[2] != "/" else "/root", "-type", "f")
    check(len(listed.splitlines()) == 2 and listed.count("program") == 1, listed)
    fatal("-H", "h1:1,h2:1", "--cwd", "/", program, code=64, has=["cannot be executed there"])
    for host in (1, 2):
        bed.run_on_host(host, "umount", "-l", ARGUMENTS.lockstep)
        bed.run_on_host(host, "umount", "-l", homes[host] if homes[host] != "/" else "/root")
        bed.run_on_host(host, "umount", "-l", folder)


# Output.


def output_lines_and_files_are_complete(bed):
    folder = f"{bed.folder}/logs"
    script = "i=0; while [ $i -lt 2000 ]; do echo line $i of $RANK; i=$((i+1)); done; echo last >&2"
    code, out, err = run("-H", "h1:2,h2:2", "--output", folder, "sh", "-c", script)
    check(code == 0 and len(out.splitlines()) == 8000 and err.count("last") == 4, "8000 lines")
    places = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
    for rank, host in places.items():
        mine = [line for line in out.splitlines() if line.startswith(f"[{host}:{rank}] ")]
        check(mine == [f"[{host}:{rank}] line {i} of {rank}" for i in range(2000)], f"the order within rank {rank}")
        check(
            len(pathlib.Path(folder, f"rank.{rank}.out").read_text(encoding="ascii").splitlines()) == 2000,
            "its file on the launching side",
        )


# What is wrong is said, host by host, before a rank runs.


def duplicate_host_is_rejected(bed):
    fatal("-H", "h1:1,10.77.0.1:1", "true", code=64, has=['host \\"10.77.0.1\\": it is the same machine as \\"h1\\"'])


def ssh_errors_are_explained(bed):
    fatal("-H", "h1:1,nohost:1", "true", code=64, has=['host \\"nohost\\": unknown host'])
    machines = pathlib.Path(bed.folder, "ports")
    machines.write_text("h1:1\nh2:1 port=2\n", encoding="ascii")
    fatal("--hostfile", machines, "true", code=64, has=['host \\"h2\\": refused: nobody listens there'])
    bed.configure_ssh(
        f"Host k2\nHostName h2\nHostKeyAlias h2\nUserKnownHostsFile {bed.folder}/ssh/known\nIdentityFile /dev/null\nIdentitiesOnly yes\n"
        f"Host u2\nHostName h2\nHostKeyAlias other\nUserKnownHostsFile {bed.folder}/ssh/known\n"
    )
    fatal("-H", "h1:1,k2:1", "true", code=64, has=['host \\"k2\\": the key was not accepted'])
    fatal("-H", "h1:1,u2:1", "true", code=64, has=['host \\"u2\\": its host key is not known'])
    bed.configure_ssh()
    fatal(
        "-H",
        "h1:1,h2:1",
        "--remote-path",
        "/nowhere/lockstep",
        "true",
        code=64,
        has=['there is no program \\"/nowhere/lockstep\\"'],
    )
    talker = pathlib.Path(bed.folder, "talker")
    talker.write_text(
        f"#!/bin/sh\necho Welcome, the weather is fine today\nexec {ARGUMENTS.lockstep} agent --guarded\n",
        encoding="ascii",
    )
    talker.chmod(0o755)
    fatal(
        "-H",
        "h1:1",
        "--remote-path",
        talker,
        "true",
        code=64,
        has=['host \\"h1\\": what came was not from lockstep', ".bashrc"],
    )
    bed.cut(3)
    begun = time.monotonic()
    fatal("-H", "h1:1,h3:1", "--connect-timeout", 2, "true", code=64, has=['host \\"h3\\": no'])
    check(time.monotonic() - begun < 6, "within the connect timeout")
    bed.heal(3)


def different_build_and_missing_library(bed):
    other = pathlib.Path(bed.folder, "other")
    shutil.copy(ARGUMENTS.lockstep, other)
    subprocess.run(["objcopy", "--remove-section", ".note.gnu.build-id", other], check=True)
    bed.run_on_host(2, "mount", "--bind", other, ARGUMENTS.lockstep)
    fatal("-H", "h1:1,h2:1", "true", code=64, has=['host \\"h2\\": its lockstep is another build'])
    bed.run_on_host(2, "umount", "-l", ARGUMENTS.lockstep)
    library = next(
        line.split()[2]
        for line in subprocess.run(
            ["ldd", ARGUMENTS.lockstep], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        if "libstdc++" in line
    )
    bed.run_on_host(2, "mount", "--bind", "/dev/null", os.path.realpath(library))
    fatal("-H", "h1:1,h2:1", "true", code=64, has=['host \\"h2\\": a library is missing there', "libstdc++"])
    bed.run_on_host(2, "umount", "-l", os.path.realpath(library))


def unusable_hosts_are_listed(bed):
    err = fatal(
        "-H", "h1:1,h2:1,nohost:1,h3:1,h4:1,neither:1", "true", code=64, has=["2 of 6 hosts cannot be used", "nohost"]
    )
    told = [line for line in err.splitlines() if line.startswith("lockstep: host")]
    check(len(told) == 2 and "nohost" in told[0] and "neither" in told[1], "a line each")
    until(lambda: not any(bed.processes(host) for host in (1, 2, 3, 4)), "something runs", 5)


def failures_among_sixty_four_hosts(bed):
    bed.introduce()
    everywhere = ["-H", ",".join(f"h{host}:1" for host in range(1, MANY + 1))]
    job = Run(*everywhere, "sh", "-c", "echo $RANK/$WORLD_SIZE $(hostname)")
    code, out, err = job.end()
    expected = [f"[h{1 + rank}:{rank}] {rank}/{MANY} h{1 + rank}" for rank in range(MANY)]
    check(code == 0 and lines(out) == sorted(expected), f"{MANY} hosts after {job.took:.1f} s {err[-300:]}")
    check(all(bed.connections(host) == 1 for host in range(1, MANY + 1)), "one connection a host")
    # All talk when one fails.
    talk = "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; [ $RANK.$i = 36.200 ] && exit 9; done; sleep 60"
    err = fatal(*everywhere, "sh", "-c", talk, code=9, has=["cause=RANK_EXITED", "rank=36", "host=h37"])
    check(len([line for line in err.splitlines() if "rank=" in line]) == 1, "and nobody else is blamed")
    bed.power_off(17)
    bed.cut(40)
    err = fatal(*everywhere, "--connect-timeout", 15, "true", code=64, has=[f"2 of {MANY} hosts cannot be used", "h17"])
    told = [line for line in err.splitlines() if line.startswith("lockstep: host")]
    check(len(told) == 2 and "h17" in told[0] and "h40" in told[1], "\n".join(told))
    until(lambda: not any(bed.processes(host) for host in range(1, MANY + 1) if host != 17), "something runs", 10)


def hosts_unreachable_from_each_other(bed):
    bed.cut_one_way(1, 2)  # both reach the launcher
    fatal(
        "-H",
        "h1:1,h2:1",
        "true",
        code=69,
        has=['host \\"h1\\" (10.77.0.1, eth0) does not reach \\"h2\\" (10.77.0.2, eth0)'],
    )
    bed.heal_one_way(1, 2)


def interface_selection(bed):
    for host in (1, 2):
        host_cluster.sh("ip", "-n", f"h{host}", "link", "add", "docker0", "type", "bridge")
        host_cluster.sh("ip", "-n", f"h{host}", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host_cluster.sh("ip", "-n", f"h{host}", "link", "set", "docker0", "up")
    show = ["sh", "-c", "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME ${LOCKSTEP_INTERFACE-}"]
    check(
        lines(good("-H", "h1:1,h2:1", *show)) == ["[h1:0] 10.77.0.1 eth0", "[h2:1] 10.77.0.1 eth0"],
        "the one that routes to the launcher",
    )
    for choice in ("eth0", "10.77.0.0/24", "^docker0"):
        check(
            lines(good("-H", "h1:1,h2:1", "--interface", choice, *show))
            == ["[h1:0] 10.77.0.1 eth0 eth0", "[h2:1] 10.77.0.1 eth0 eth0"],
            choice,
        )
    host_cluster.sh("ip", "-n", "h1", "addr", "add", "10.77.0.101/24", "dev", "eth0")  # two that fit
    check(
        lines(good("-H", "h1:1,h2:1", "--interface", "10.77.0.0/24", "sh", "-c", "sleep 0.5; echo $RANK"))
        == ["[h1:0] 0", "[h2:1] 1"],
        "a host with two addresses",
    )
    host_cluster.sh("ip", "-n", "h1", "addr", "del", "10.77.0.101/24", "dev", "eth0")
    fatal("-H", "h1:1,h2:1", "--interface", "docker0", *show, code=69, has=["does not reach", "172.17.0.1"])
    fatal(
        "-H",
        "h1:1,h2:1",
        "--interface",
        "ib0",
        *show,
        code=69,
        has=['no address of its own fits --interface \\"ib0\\"; it has eth0 10.77.0.1, docker0 172.17.0.1'],
    )
    check(
        lines(good("-H", "h1:1,h2:1", "sh", "-c", "echo $GLOO_SOCKET_IFNAME", env={"GLOO_SOCKET_IFNAME": "docker0"}))
        == ["[h1:0] docker0", "[h2:1] docker0"],
        "a user's value is kept",
    )
    fatal(
        "-H",
        "h1:1,h2:1",
        "true",
        env={"GLOO_SOCKET_IFNAME": "eth7"},
        code=64,
        has=['GLOO_SOCKET_IFNAME is \\"eth7\\"', "eth0"],
    )


# Whatever dies, nobody is left.

SLEEPERS = ["sh", "-c", "sleep 300 & sleep 300"]  # a rank with a child of its own


def start_sleepers(bed, *options):
    job = Run("-H", "h1:2,h2:2", *options, *SLEEPERS)
    until(
        lambda: all(
            sum("sleep 300" in words and "sh -c" not in words for words in bed.processes(host).values()) == 4
            for host in (1, 2)
        ),
        "the ranks do not start",
    )
    return job


def pids(bed, host, what):
    return sorted(pid for pid, words in bed.processes(host).items() if what in words)


def child_of(pid, what):
    """The pid of a process below `pid`."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [
        int(child)
        for child in children
        if what in pathlib.Path(f"/proc/{child}/cmdline").read_text(encoding="ascii", errors="replace")
    ]


def all_end(bed, job, limit_s, has, code, hosts=(1, 2)):
    begun = time.monotonic()
    exit_code, _, err = job.end(30)
    told = time.monotonic() - begun
    line = err.splitlines()[-1] if err else ""
    until(lambda: not any(bed.processes(host) for host in hosts), "processes are left", 20)
    gone = time.monotonic() - begun
    check(
        gone <= limit_s and (code is None or exit_code == code) and all(text in line for text in has),
        f"told after {told:.2f} s, gone after {gone:.2f} s, code {exit_code}: {line[:250]}",
    )
    return gone


def rank_killed(bed):
    job = start_sleepers(bed)
    os.kill(pids(bed, 2, "sh -c sleep")[0], signal.SIGKILL)
    all_end(
        bed, job, 5, ["cause=RANK_DIED", "host=h2", "killed by SIGKILL"], 137
    )  # the children of its neighbours have 2 s of grace


def agent_killed(bed):
    job = start_sleepers(bed)
    guard, agent = pids(bed, 2, "lockstep agent")
    os.kill(agent, signal.SIGKILL)
    all_end(bed, job, 10, ["cause=INTERNAL", "host=h2", "was killed by SIGKILL"], 70)
    job = start_sleepers(bed)
    guard, agent = pids(bed, 2, "lockstep agent")
    os.kill(guard, signal.SIGKILL)
    all_end(bed, job, 10, ["host=h2"], None)


def stopped_agent_ends_with_launcher(bed):
    job = start_sleepers(bed)
    os.kill(pids(bed, 2, "lockstep agent")[1], signal.SIGSTOP)
    job.process.kill()
    all_end(bed, job, 10, [], -9)


def ssh_killed(bed):
    job = start_sleepers(bed)
    os.kill(child_of(job.process.pid, "h2")[0], signal.SIGKILL)
    all_end(bed, job, 10, ["cause=PEER_UNREACHABLE", "host=h2", "ssh was killed by SIGKILL"], 69)


def launcher_killed(bed):
    job = start_sleepers(bed)
    job.process.kill()
    all_end(bed, job, 10, [], -9)


def link_cut(bed):
    job = start_sleepers(bed)
    bed.cut(2)
    try:
        all_end(bed, job, 10, ["cause=PEER_UNREACHABLE", "host=h2", "cannot be reached any more"], 69)
    finally:
        bed.heal(2)


def launcher_host_powered_off(bed):
    words = [ARGUMENTS.lockstep, "run", "-H", "h2:2,h3:2"]
    job = subprocess.Popen(
        bed.inside(1, [*words, *SLEEPERS]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(
        lambda: all(sum("sleep 300" in line for line in bed.processes(host).values()) == 6 for host in (2, 3)),
        "the ranks do not start",
    )
    bed.power_off(1)
    gone = until(lambda: not any(bed.processes(host) for host in (2, 3)), "processes are left", 20)
    job.wait(timeout=10)
    check(gone <= 10, f"nobody is left on the other hosts after {gone:.2f} s")
    bed.power_on(1)
    again = subprocess.run(
        bed.inside(1, [*words, "hostname"]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    check(
        again.returncode == 0 and lines(again.stdout) == ["[h2:0] h2", "[h2:1] h2", "[h3:2] h3", "[h3:3] h3"],
        f"the next start works: {again.stdout} {again.stderr}",
    )


def stopped_launcher_keeps_ranks_running(bed):
    job = start_sleepers(bed)
    os.kill(job.process.pid, signal.SIGSTOP)
    time.sleep(8)  # longer than a host may be silent: that nothing happens takes this long to see
    left = [sum("sleep 300" in words for words in bed.processes(host).values()) for host in (1, 2)]
    os.kill(job.process.pid, signal.SIGCONT)
    check(left == [6, 6], f"all are there: {left}")
    os.kill(job.process.pid, signal.SIGINT)
    all_end(bed, job, 12, ["cause=INTERRUPTED"], 130)


# What people run.


def torch_distributed_runs_unmodified(bed):
    if not ARGUMENTS.python:
        host_cluster.skip("there is no Python with torch (scripts/setup.sh)")
    script = pathlib.Path(__file__).resolve().parent / "all_reduce.py"
    out = good("-H", "h1:2,h2:1", ARGUMENTS.python, script)
    check(len(lines(out)) == 3, out)


def mnist_losses_match(bed):
    folder = pathlib.Path(bed.folder)
    digits.write(folder, 400)
    losses = {}
    for name, hosts in (("one", "h1:4"), ("two", "h1:2,h2:2")):
        log = folder / f"losses.{name}"
        good(
            "-H",
            hosts,
            "--transport",
            "gloo",
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
    apart = max(abs(a - b) for a, b in zip(losses["one"], losses["two"], strict=True))
    check(
        len(losses["one"]) == 20 and apart <= 1e-5,
        f"{len(losses['one'])} losses over one host and over two are {apart:.2e} apart",
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
        ship_stages_missing_files,
        output_lines_and_files_are_complete,
        duplicate_host_is_rejected,
        ssh_errors_are_explained,
        different_build_and_missing_library,
        unusable_hosts_are_listed,
        failures_among_sixty_four_hosts,
        hosts_unreachable_from_each_other,
        interface_selection,
        rank_killed,
        agent_killed,
        stopped_agent_ends_with_launcher,
        ssh_killed,
        launcher_killed,
        link_cut,
        launcher_host_powered_off,
        stopped_launcher_keeps_ranks_running,
        torch_distributed_runs_unmodified,
        mnist_losses_match,
    )
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--python", default="")
    parser.add_argument("--mnist", default="")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("cases", nargs="*")
    global ARGUMENTS
    ARGUMENTS = parser.parse_args()
    host_cluster.enter_sandbox((*ssh_cluster.TOOLS, "objcopy"))
    with tempfile.TemporaryDirectory() as folder:
        cases = ARGUMENTS.cases or [name for name in CASES if name != failures_among_sixty_four_hosts.__name__]
        bed = ssh_cluster.SshCluster(MANY if cases == [failures_among_sixty_four_hosts.__name__] else NUM_HOSTS, folder)
        for name in cases:
            for _ in range(ARGUMENTS.runs):
                print(f"-- {name}", flush=True)
                CASES[name](bed)


main()
