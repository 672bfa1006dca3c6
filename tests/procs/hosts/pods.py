#!/usr/bin/env python3
"""Tests jobs in pods: network namespaces with the variables that Kubernetes operators and other platforms set.

Usage: pods.py --lockstep PROGRAM --program TRAIN_PROBE [CASE ...]
The program is train_probe, or a Python program that does the same. The exit code is 77 if there can be no namespaces.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import checks  # noqa: E402
import host_cluster  # noqa: E402

ARGS = checks.parse_arguments("lockstep", "program")
PODS = 3
PORT = "23456"


def kubeflow(pod, num_pods, master, ranks="1"):
    return {
        "PET_NODE_RANK": pod,
        "PET_NNODES": num_pods,
        "PET_NPROC_PER_NODE": ranks,
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": PORT,
    }


def per_pod(pod, num_pods, master):
    return {"RANK": pod, "WORLD_SIZE": num_pods, "MASTER_ADDR": master, "MASTER_PORT": PORT}


# What sets the variables, and where rank 0 says that they come from.
ORCHESTRATORS = {
    "TrainJob v2": (kubeflow, "pod"),
    "TrainJob v2, one GPU": (lambda *pod: kubeflow(*pod, ranks="gpu"), "pod"),
    "PyTorchJob v1": (lambda *pod: {**kubeflow(*pod), **per_pod(*pod)}, "env://"),
    "Volcano, PAI-DLC": (per_pod, "env://"),
    "AIHC": (lambda *pod: {**per_pod(*pod), "NPROC_PER_NODE": 1}, "env://"),
}
# Those that do not say enough for a program to join.
UNCLEAR = {
    "TrainJob v2, 8 ranks": lambda *pod: kubeflow(*pod, ranks="8"),
    "PyTorchJob v1, elastic": lambda pod, num_pods, master: {**kubeflow(pod, "1:4", master)},
    "indexed Job, JobSet": lambda pod, num_pods, master: {"JOB_COMPLETION_INDEX": pod},
    "SageMaker": lambda pod, num_pods, master: {"SM_HOSTS": '["h1", "h2", "h3"]', "SM_CURRENT_HOST": f"h{pod + 1}"},
}


def start(cluster, pod, variables, *words):
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return cluster.start(
        pod + 1, words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def results(pods, limit_s=60):
    end = time.monotonic() + limit_s
    return [(pod.communicate(timeout=max(1, end - time.monotonic()))[0], pod.returncode) for pod in pods]


def train(*how):
    return [ARGS.program, *how]


def one_rank_in_each_pod(cluster):
    for name, (variables, source) in ORCHESTRATORS.items():
        pods = [start(cluster, pod, variables(pod, PODS, "h1"), *train("slow", "99")) for pod in range(PODS)]
        outputs = results(pods)
        checks.check(
            f"{PODS} ranks on {PODS} hosts ({source})" in outputs[0][0]
            and all(code == 0 and f"rank {pod} pid" in said for pod, (said, code) in enumerate(outputs)),
            f"{name}: the program in each pod is a rank of one world" + said_if_failed(outputs),
        )


def said_if_failed(outputs):
    return "" if all(code == 0 for _, code in outputs) else f": {outputs}"


def unclear_variables_are_named(cluster):
    for name, variables in UNCLEAR.items():
        said, code = results([start(cluster, 1, variables(1, PODS, "h1"), *train("slow", "99"))])[0]
        word = re.escape(next(iter(variables(1, PODS, "h1"))))
        checks.check(code != 0 and re.search(rf"{word}=", said), f"{name}: an error names the variables: {said[-400:]}")


def lockstep_run_is_refused(cluster):
    of_all = {**{name: one[0] for name, one in ORCHESTRATORS.items()}, **UNCLEAR}
    for name, variables in of_all.items():
        given = variables(1, PODS, "h1")
        said, code = results([start(cluster, 1, given, ARGS.lockstep, "run", "-n", "2", "true")])[0]
        checks.check(
            code == 64 and f"{next(iter(given))}=" in said, f"{name}: lockstep run does not start a second world"
        )
        said, code = results([start(cluster, 1, given, ARGS.lockstep, "run", "-n", "2", "--env-from", "none", "true")])[
            0
        ]
        checks.check(code == 0, f"{name}: --env-from none overrides it")


def name_and_pods_come_late(cluster):
    """The last pod starts first; the name of the first is known after 6 s, and it starts after 36 s."""
    variables = [kubeflow(pod, PODS, "job-node-0-0.job") for pod in range(PODS)]
    pods = [start(cluster, 2, variables[2], *train("slow", "99"))]
    time.sleep(6)
    with open(f"{cluster.folder}/hosts", "a", encoding="ascii") as names:
        names.write(f"{host_cluster.SUBNET}1 job-node-0-0.job\n")
    time.sleep(30)
    pods.insert(0, start(cluster, 0, variables[0], *train("slow", "99")))
    time.sleep(32)
    pods.insert(1, start(cluster, 1, variables[1], *train("slow", "99")))
    outputs = results(pods)
    checks.check(all(code == 0 for _, code in outputs), "all join" + said_if_failed(outputs))
    checks.check("cannot resolve host" in outputs[2][0], "the pod that waits for the name says so")
    checks.check("cannot connect to" in outputs[2][0], "the pod that waits for the port says so")
    checks.check("waits for 1 of 3 ranks" in outputs[0][0], "rank 0 says who is missing")


def killed_pod_is_named(cluster):
    variables = [kubeflow(pod, PODS, "h1") for pod in range(PODS)]
    pods = [start(cluster, pod, variables[pod], *train("until_stop")) for pod in range(PODS)]
    time.sleep(6)
    begin = time.monotonic()
    pods[1].kill()
    outputs = results(pods)
    took = time.monotonic() - begin
    checks.check(took < 10 and outputs[0][1] and outputs[2][1], f"the others end within 10 s: {took:.1f} s")
    for said, _ in (outputs[0], outputs[2]):
        checks.check("rank 1 ended" in said.splitlines()[-1], f"they name rank 1: {said[-300:]}")


CASES = (
    one_rank_in_each_pod,
    unclear_variables_are_named,
    lockstep_run_is_refused,
    name_and_pods_come_late,
    killed_pod_is_named,
)


def main():
    host_cluster.enter_sandbox()
    for name in list(os.environ):
        if name.startswith(("LOCKSTEP_", "PET_", "SM_", "SLURM_", "PMI")) or name in per_pod(0, 1, ""):
            del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="lockstep-pods-") as folder, contextlib.ExitStack() as stack:
        empty = pathlib.Path(folder, "resolv.conf")
        empty.touch()
        host_cluster.sh("mount", "--bind", empty, "/etc/resolv.conf")
        stack.callback(host_cluster.sh, "umount", "/etc/resolv.conf")
        cluster = host_cluster.HostCluster(PODS, folder)
        stack.callback(host_cluster.sh, "umount", "/etc/hosts")
        for case in CASES:
            if not ARGS.cases or case.__name__ in ARGS.cases:
                print(f"--- {case.__name__}", flush=True)
                case(cluster)


main()
