#!/usr/bin/env python3
"""Tests ranks that other launchers start: mpirun of Open MPI, mpiexec of MPICH, srun, and the variables of torchrun.

Usage: external_launchers.py --lockstep PATH --program PATH_OF_FAULT_PROBE [--mpi TEXT] [--fake-mpi PATH] [CASE]. The
default is all cases. TEXT is the version string of the MPI library of the build. The cases with SLURM or two hosts
require root, for a sandbox. The exit code is 77 if the machine lacks what a case requires.
"""

import argparse
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import slurm_cluster  # noqa: E402
from checks import check  # noqa: E402

LIMIT_S = 240
PYTHON = pathlib.Path(__file__).resolve().parents[3] / ".deps/python/bin"  # has torch
NUM_ELEMENTS = 1024  # of the sum that the program prints


def environment(**more):
    """Returns the environment of this process without the variables of launchers, and with `more`."""
    other = re.compile(r"^(OMPI_|PMI|SLURM_(?!CONF)|LOCKSTEP_|TORCHELASTIC_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_)")
    return {
        **{key: value for key, value in os.environ.items() if not other.match(key)},
        "OMP_NUM_THREADS": "1",
        "LOCKSTEP_JOIN_TIMEOUT": "20",
        **more,
    }


def run(words, **options):
    """Runs a command. Returns (exit code, stdout and stderr)."""
    done = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **{"env": environment(), **options},
    )
    return done.returncode, done.stdout


def expect_sum(done, ranks, contract, worlds=1, hosts="1 host"):
    """Checks that all ranks of `worlds` jobs print the sum, and that rank 0 prints whose variables it read."""
    code, output = done
    check(
        code == 0 and output.count(f"sum {NUM_ELEMENTS * ranks}\n") == ranks * worlds,
        f"{ranks} ranks have the sum; exit code {code} {output if code else ''}",
    )
    message = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {hosts} ({contract})"
    check(output.count(message) == worlds, f"init() prints: {message} {'' if message in output else output}")


def expect_error(done, *parts):
    """Checks that a command failed, and that its output contains all of `parts`."""
    code, output = done
    complete = all(part in output for part in parts)
    check(code != 0 and complete, f"fails with {', '.join(parts)}; exit code {code} {'' if complete else output}")


def open_mpi_command(args):
    if not args.mpi.startswith("Open MPI"):
        host_cluster.skip("this build's MPI is not Open MPI")
    for name in ("mpirun.openmpi", "mpirun"):
        if shutil.which(name):
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            # Its plugins leak, and are unloaded before a sanitizer reports.
            no_leak_check = ["-x", "LSAN_OPTIONS=detect_leaks=0"]
            return [name, *root, "--oversubscribe", "--bind-to", "none", *no_leak_check]
    return host_cluster.skip("mpirun is not installed (Debian: openmpi-bin)")


def hydra():
    """Returns the launcher of MPICH."""
    for name in ("mpiexec.mpich", "mpiexec.hydra"):
        if shutil.which(name):
            return [name]
    return host_cluster.skip("hydra is not installed (Debian: mpich)")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def mpirun(args, folder):
    expect_sum(run([*open_mpi_command(args), "-n", 3, args.program, "none", 0]), 3, "mpi")
    expect_sum(run([*open_mpi_command(args), "-n", 1, args.program, "none", 0]), 1, "mpi")


def mpich_mpiexec(args, folder):
    expect_sum(run([*hydra(), "-n", 3, args.program, "none", 0]), 3, "pmi")
    expect_sum(run([*hydra(), "-n", 1, args.program, "none", 0]), 1, "pmi")
    store = environment(LOCKSTEP_STORE=f"127.0.0.1:{free_port()}")
    expect_sum(run([*hydra(), "-n", 2, args.program, "none", 0], env=store), 2, "pmi")


def launcher_of_different_mpi(args, folder):
    """Ranks that request MPI must fail, because each of them would be a world of one rank."""
    open_mpi_command(args)
    for variable in ("LOCKSTEP_TRANSPORT", "LOCKSTEP_CROSS_HOST_TRANSPORT"):
        expect_error(
            run([*hydra(), "-n", 2, args.program, "none", 0], env=environment(**{variable: "mpi"})),
            "started by a launcher of another MPI",
            "this program's MPI is Open MPI",
        )
    # A launcher that sets only the rank and the size.
    alone = environment(PMI_RANK="1", PMI_SIZE="2")
    expect_error(
        run([args.program, "none", 0], env=alone),
        "sets no address for the rendezvous",
        "this program's MPI is Open MPI",
        "PMI_RANK",
    )
    # A launcher whose rank differs from that of the MPI library.
    expect_error(
        run(
            [args.program, "none", 0],
            env=environment(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", PMIX_NAMESPACE="x"),
        ),
        "the launcher reports rank 1 of 2, but MPI (Open MPI",
        "reports rank 0 of 1",
    )


def different_mpi_library(args, folder):
    """A library with another name or version than that of the build must not be used."""
    started = open_mpi_command(args)
    built = "built with Open MPI " + re.search(r"\d+\.\d+", args.mpi).group()
    for text, named in (("Open MPI v9.8.7, package: fake", "Open MPI 9.8"), ("MPICH Version:\t4.0.2", "MPICH 4.0")):
        loaded = [*started, "-x", f"LD_PRELOAD={args.fake_mpi}", "-x", f"FAKE_MPI_VERSION={text}", "-n", 2]
        done = run([*loaded, args.program, "none", 0])
        if named.startswith("Open"):
            expect_error(done, built, "the MPI library that is loaded is " + named)
        else:
            expect_error(done, "this program's MPI is " + named)
    # This is not an error if the job does not use MPI.
    unused = environment(LD_PRELOAD=args.fake_mpi, FAKE_MPI_VERSION="Open MPI v9.8.7", RANK="0", WORLD_SIZE="1")
    check(run([args.program, "none", 0], env=unused)[0] == 0, "a program that does not use MPI runs")


def torchrun_variables(args, folder):
    common = environment(
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    ranks = [
        subprocess.Popen(
            [args.program, "none", "0"],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    done = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    expect_sum((max(rank.returncode for rank in ranks), "".join(done)), 2, "torchrun")


def torchrun(*words):
    """Returns the command that starts a program with torchrun on this host."""
    if not (PYTHON / "torchrun").exists():
        host_cluster.skip("torchrun is not installed (scripts/setup.sh)")
    return [PYTHON / "torchrun", "--master-port", free_port(), "--no-python", *words]


def torchrun_and_lockstep_run(args, folder):
    program, own = [args.program, "none", 0], environment(TMPDIR=folder)  # where torchrun leaves files
    done = run(torchrun("--nproc-per-node", 1, args.lockstep, "run", "-n", 2, *program), env=own)
    expect_sum((done[0], re.sub(r"(?m)^\[\d\] ", "", done[1])), 2, "lockstep")
    inner = torchrun("--nproc-per-node", 2, *program)
    done = run([args.lockstep, "run", "-n", 1, *inner], env=own)
    expect_error(done, "torchrun has started this process inside rank 0 of lockstep run")
    done = run([args.lockstep, "run", "-n", 1, "env", "LOCKSTEP_ENV_FROM=torchrun", *inner], env=own)
    expect_sum((done[0], done[1].replace("[0] ", "")), 2, "torchrun")


def error_of_a_torch_program(args, folder):
    """A program with the decorator `record` ends with an exception."""
    script = pathlib.Path(folder) / "main.py"
    script.write_text(
        "import os, time, torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    assert dist.is_torchelastic_launched() and dist.get_world_size() == 2\n"
        "    if dist.get_rank() == 1:\n"
        "        raise ValueError('no such file')\n"
        "    time.sleep(60)\n"
        "main()\n"
    )
    done = run([args.lockstep, "run", "-n", 2, PYTHON / "python", script], env=environment(TMPDIR=folder))
    expect_error(done, "cause=RANK_EXITED rank=1", 'detail="exited with code 1: ValueError: no such file"')
    left = [name for name in os.listdir(folder) if name.startswith("lockstep-error-")]
    check(not left, f"no file is left {left}")


def slurm_step_on_two_hosts(args, folder):
    """Sets the variables of SLURM. The first host resolves its own name to a loopback address, as on Debian."""
    cluster = host_cluster.HostCluster(2, folder)
    ranks = []
    for rank, host in enumerate((1, 1, 2, 2)):
        names = pathlib.Path(folder) / f"hosts.{host}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 h{host}\n10.77.0.{3 - host} h{3 - host}\n")
        variables = environment(
            SLURM_PROCID=str(rank),
            SLURM_NTASKS="4",
            SLURM_LOCALID=str(rank % 2),
            SLURM_NODEID=str(host - 1),
            SLURM_STEP_NUM_NODES="2",
            SLURM_JOB_ID="71",
            SLURM_STEP_ID="4",
            SLURM_STEP_NODELIST="h[1-2]",
            SLURM_STEP_TASKS_PER_NODE="2(x2)",
        )
        words = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'mount --bind {names} /etc/hosts && exec "$@"',
            "sh",
            args.program,
            "none",
            "0",
        ]
        ranks.append(
            cluster.start(host, words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    done = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    expect_sum((max(rank.returncode for rank in ranks), "".join(done)), 4, "slurm", hosts="2 hosts")
    check("address 10.77.0.1" in "".join(done), "the rendezvous is at an address that all ranks reach")


def slurm_step(args, folder):
    expect_sum(run(["srun", "-N2", "-n3", args.program, "none", 0]), 3, "slurm")
    expect_sum(run(["srun", "-N1", "-n2", args.program, "none", 0]), 2, "slurm")
    expect_sum(run(["srun", "-N1", "-n1", args.program, "none", 0]), 1, "slurm")
    for plugin in ("pmi2", "pmix"):
        expect_sum(run(["srun", f"--mpi={plugin}", "-N2", "-n4", args.program, "none", 0]), 4, "slurm")
        expect_sum(
            run(["srun", f"--mpi={plugin}", "-n2", args.program, "none", 0], env=environment(LOCKSTEP_ENV_FROM="pmi")),
            2,
            "pmi" if plugin == "pmi2" else "pmix",
        )


def two_slurm_steps_of_one_job(args, folder):
    step = f"srun --exact -N1 -n2 {args.program} none 0 &"
    script = f"{step} first=$!; {step} wait $! && wait $first"
    expect_sum(run(["salloc", "-N2", "-n4", "bash", "-c", script]), 2, "slurm", worlds=2)


def batch_script_is_not_a_slurm_step(args, folder):
    """A batch script and the shell of salloc are not ranks, though they have SLURM_PROCID; processes of srun are."""
    script = pathlib.Path(folder) / "script"
    script.write_text(
        '#!/bin/sh\necho "procid $SLURM_PROCID of $SLURM_NTASKS, step $SLURM_STEP_ID"\n'
        f"{args.program} none 0 && srun {args.program} none 0 </dev/null\n"
    )
    script.chmod(0o755)
    code, sbatch_output = run(["sbatch", "--wait", "-N2", "-n3", f"--output={folder}/output", script])
    output = (pathlib.Path(folder) / "output").read_text()
    check("procid 0 of 3, step \n" in output, "a batch script has the variables of a rank of three")
    check(
        code == 0 and output.count(f"sum {NUM_ELEMENTS}\n") == 1 and output.count(f"sum {3 * NUM_ELEMENTS}\n") == 3,
        f"it is a world of one; exit code {code} {sbatch_output} {output}",
    )
    # At a terminal, salloc starts $SHELL in a step of its own. The script takes the shell's place, so that nothing has
    # to be typed at the right moment.
    done = subprocess.run(
        ["script", "-qec", f"env SHELL={script} salloc -N2 -n3", "/dev/null"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )
    in_step = re.search(r"procid 0 of 3, step 429496\d+", done.stdout) is not None
    check(in_step, f"salloc's shell has a step of its own {'' if in_step else done.stdout}")
    alone = done.stdout.count(f"sum {NUM_ELEMENTS}\n") == 1 and done.stdout.count(f"sum {3 * NUM_ELEMENTS}\n") == 3
    check(alone, f"it is a world of one {'' if alone else done.stdout}")


def launchers_inside_slurm_allocation(args, folder):
    """The tasks of the step are the daemons of these launchers, not the ranks."""
    # Both nodes have the same name here, by which Open MPI would select shared memory instead of TCP.
    expect_sum(
        run(
            [
                "salloc",
                "-N2",
                "-n4",
                *open_mpi_command(args),
                "--mca",
                "btl",
                "tcp,self",
                "-n",
                4,
                args.program,
                "none",
                0,
            ]
        ),
        4,
        "mpi",
    )
    expect_sum(run(["salloc", "-N2", "-n4", *hydra(), "-n", 4, args.program, "none", 0]), 4, "pmi")


def libraries_that_are_not_started(args, folder):
    """A program that loads the extension module of mpi4py or Horovod gets one warning with the right command."""
    for library, file, command in (
        ("mpi4py", "mpi4py/MPI.abi3.so", "mpirun -n 3 "),
        ("Horovod", "horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", "horovodrun -np 3 "),
    ):
        path = pathlib.Path(folder) / file
        path.parent.mkdir(parents=True)
        shutil.copy(args.fake_mpi, path)
        program = f"import ctypes, time; ctypes.CDLL('{path}'); time.sleep(3)"
        for ranks, warnings in ((3, 1), (1, 0)):
            _, output = run([args.lockstep, "run", "-n", ranks, sys.executable, "-c", program])
            found = output.count(f"warning: the ranks use {library}, for which they are 3 separate worlds of one rank")
            check(found == warnings and output.count(f"use {command}") == warnings, f"{ranks} ranks: {output}")


PLAIN_CASES = (
    mpirun,
    mpich_mpiexec,
    launcher_of_different_mpi,
    different_mpi_library,
    torchrun_variables,
    torchrun_and_lockstep_run,
    error_of_a_torch_program,
    libraries_that_are_not_started,
)
NAMESPACE_CASES = (slurm_step_on_two_hosts,)
SLURM_CASES = (
    slurm_step,
    two_slurm_steps_of_one_job,
    batch_script_is_not_a_slurm_step,
    launchers_inside_slurm_allocation,
)
CASES = {case.__name__: case for case in (*PLAIN_CASES, *NAMESPACE_CASES, *SLURM_CASES)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--mpi", default="")
    parser.add_argument("--fake-mpi", default="")
    parser.add_argument("case", nargs="?", choices=CASES)
    args = parser.parse_args()
    if not args.case:  # each in its own process, because each may enter a sandbox
        codes = [subprocess.run([sys.executable, *sys.argv, name], check=False).returncode for name in CASES]
        sys.exit(
            max(code for code in codes if code != host_cluster.SKIPPED)
            if set(codes) != {host_cluster.SKIPPED}
            else host_cluster.SKIPPED
        )
    case = CASES[args.case]
    if case in SLURM_CASES:
        for tool in ("munged", "slurmctld", "slurmd", "srun"):
            if not shutil.which(tool):
                host_cluster.skip(f"{tool} is not installed (Debian: slurm-wlm, munge)")
    if case not in PLAIN_CASES:
        host_cluster.enter_sandbox(("ip", "mount", "script"))
    print(f"-- {args.case}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        slurm = slurm_cluster.SlurmCluster(folder) if case in SLURM_CASES else None
        if slurm:
            os.environ["SLURM_CONF"] = slurm.environment["SLURM_CONF"]
        try:
            case(args, folder)
        finally:
            if slurm:
                slurm.close()


main()
