#!/usr/bin/env python3
"""Tests jobs in pods: network namespaces with the variables that Kubernetes operators and other platforms set.

Usage: pods.py --lockstep PROGRAM --program TRAIN_PROBE --torchrun PROGRAM [CASE ...]
The program is train_probe, or a Python program that does the same. The exit code is 77 if there can be no namespaces.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import checks  # noqa: E402
import host_cluster  # noqa: E402

ARGS = checks.parse_arguments("lockstep", "program", "torchrun")
PODS = 3
EACH_POD = range(PODS)
PORT = "23456"


def kubeflow(pod, num_pods, master, ranks="1", port=PORT):
    return {
        "PET_NODE_RANK": pod,
        "PET_NNODES": num_pods,
        "PET_NPROC_PER_NODE": ranks,
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": port,
    }


def per_pod(pod, num_pods, master):
    return {"RANK": pod, "WORLD_SIZE": num_pods, "MASTER_ADDR": master, "MASTER_PORT": PORT}


def sagemaker(pod, num_pods, _):
    hosts = [f"h{host + 1}" for host in range(num_pods)]
    return {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[pod]}


# What sets the variables, and where rank 0 says that they come from.
ORCHESTRATORS = {
    "TrainJob v2": (kubeflow, "pod"),
    "TrainJob v2, one GPU": (lambda *pod: kubeflow(*pod, ranks="gpu"), "pod"),
    "PyTorchJob v1": (lambda *pod: {**kubeflow(*pod), **per_pod(*pod)}, "env://"),
    "Volcano, PAI-DLC": (per_pod, "env://"),
    "JobSet, indexed Job": (lambda *pod: {**per_pod(*pod), "JOB_COMPLETION_INDEX": pod[0]}, "env://"),
    "AIHC": (lambda *pod: {**per_pod(*pod), "NPROC_PER_NODE": 1}, "env://"),
    "SageMaker": (sagemaker, "pod"),
}
# Those that do not say enough for a program to join.
UNCLEAR = {
    "TrainJob v2, 8 ranks": lambda *pod: kubeflow(*pod, ranks="8"),
    "PyTorchJob v1, elastic": lambda pod, num_pods, master: {**kubeflow(pod, "1:4", master)},
    "indexed Job, JobSet": lambda pod, num_pods, master: {"JOB_COMPLETION_INDEX": pod},
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
        pods = [start(cluster, pod, variables(pod, PODS, "h1"), *train("slow", "99")) for pod in EACH_POD]
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


def run(*words):
    return [ARGS.lockstep, "run", *words]


def torchrun_reads_the_variables_itself(cluster):
    words = [ARGS.torchrun, "--no-python", *train("slow", "99")]
    pods = [start(cluster, pod, kubeflow(pod, 2, "h1", ranks="2"), *words) for pod in range(2)]
    outputs = results(pods)
    checks.check("4 ranks on 2 hosts (torchrun)" in outputs[0][0], "torchrun in each pod" + said_if_failed(outputs))


def launchers_in_all_pods_are_one_job(cluster):
    for name, (variables, _) in ORCHESTRATORS.items():
        pods = [
            start(cluster, pod, variables(pod, PODS, "h1"), *run("-n", "2", *train("slow", "99"))) for pod in EACH_POD
        ]
        outputs = results(pods)
        checks.check(
            f"{2 * PODS} ranks on {PODS} hosts (lockstep)" in outputs[0][0] and all(code == 0 for _, code in outputs),
            f"{name}: {2 * PODS} ranks" + said_if_failed(outputs),
        )
        checks.check("the pods of this job have no key" in outputs[0][0], "without a key, a warning")


def launchers_take_their_number_of_ranks_from_the_pod(cluster):
    pods = [start(cluster, pod, kubeflow(pod, PODS, "h1", ranks="2"), *run(*train("slow", "99"))) for pod in EACH_POD]
    outputs = results(pods)
    checks.check(f"{2 * PODS} ranks on {PODS} hosts" in outputs[0][0], "PET_NPROC_PER_NODE" + said_if_failed(outputs))


def launchers_that_do_not_know_the_others_are_refused(cluster):
    for name, variables in UNCLEAR.items():
        if "8 ranks" in name:
            continue
        given = variables(1, PODS, "h1")
        said, code = results([start(cluster, 1, given, *run("-n", "2", "true"))])[0]
        checks.check(
            code == 64 and f"{next(iter(given))}=" in said,
            f"{name}: lockstep run does not start a second world: {said}",
        )
        said, code = results([start(cluster, 1, given, *run("-n", "2", "--env-from", "none", "true"))])[0]
        checks.check(code == 0, f"{name}: --env-from none overrides it: {said}")


def start_launchers(cluster, *how, ranks="2", options=()):
    """Starts lockstep run in all pods, and waits until the ranks train."""
    pods = [
        start(cluster, pod, kubeflow(pod, PODS, "h1"), *run("-n", ranks, *options, *train(*how))) for pod in EACH_POD
    ]
    wait_for_output(pods[0], f"rank {2 * PODS - 1} pid")
    return pods


def wait_for_output(pod, text):
    for line in pod.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not printed")


def same_end(name, outputs, code, *words):
    """The last line of all pods is the same and has `words`, and so are their exit codes."""
    lines = {said.splitlines()[-1] for said, _ in outputs}
    is_same = len(lines) == 1 and {found for _, found in outputs} == {code}
    is_right = is_same and all(word in min(lines) for word in words)
    checks.check(is_right, f"{name}: all pods end alike: {min(lines) if is_right else outputs}")


def killed_pod_ends_the_job(cluster):
    pods = start_launchers(cluster, "until_stop", options=("--retry-exit-code", "130"))
    begin = time.monotonic()
    pods[1].kill()
    outputs = results([pods[0], pods[2]])
    took = time.monotonic() - begin
    checks.check(took < 10, f"the others end within 10 s: {took:.1f} s")
    same_end("a killed pod", outputs, 130, "FATAL", "PEER_UNREACHABLE", "pod h2")
    pods[1].communicate()


def killed_launcher_ends_the_job(cluster):
    pods = start_launchers(cluster, "until_stop")
    begin = time.monotonic()
    pods[0].kill()
    outputs = results(pods[1:])
    took = time.monotonic() - begin
    checks.check(took < 10, f"the others end within 10 s: {took:.1f} s")
    checks.check(
        all(code == 69 and "cause=COORDINATOR_LOST" in said.splitlines()[-1] for said, code in outputs),
        f"they say that the launcher is lost: {outputs}",
    )
    pods[0].communicate()


def failing_rank_is_named_by_all(cluster):
    pods = [
        start(cluster, pod, kubeflow(pod, PODS, "h1"), *run("-n", "2", "sh", "-c", FAILS_ON_RANK_3)) for pod in EACH_POD
    ]
    same_end("a rank that fails", results(pods), 3, "FATAL", "rank=3", "host=h2")


FAILS_ON_RANK_3 = "sleep 1; if [ $LOCKSTEP_RANK = 3 ]; then exit 3; fi; sleep 30"


def signal_to_any_pod_stops_the_job(cluster):
    pods = start_launchers(cluster, "until_stop")
    pods[2].send_signal(signal.SIGTERM)
    same_end("SIGTERM to the last pod", results(pods), 75, "FATAL", "cause=PREEMPTED")


def pods_with_another_command_or_key_are_refused(cluster):
    words = ["1", "1", "2"]
    pods = [start(cluster, pod, kubeflow(pod, PODS, "h1"), *run("-n", words[pod], "true")) for pod in EACH_POD]
    outputs = results(pods[:2])
    checks.check(
        all(code == 64 and "pod 2 (" in said and "start the same lockstep run" in said for said, code in outputs),
        f"another command is named: {outputs}",
    )
    pods[2].kill()
    pods[2].communicate()
    keys = [pathlib.Path(cluster.folder, f"key{pod}") for pod in EACH_POD]
    for pod, key in enumerate(keys):
        key.write_bytes(bytes([65 + pod // 2]) * 32)
        key.chmod(0o400)
    pods = [
        start(
            cluster,
            pod,
            {**kubeflow(pod, 2, "h1"), "LOCKSTEP_KEY_FILE": keys[pod]},
            *run("-n", "2", *train("slow", "99")),
        )
        for pod in range(2)
    ]
    outputs = results(pods)
    checks.check("4 ranks on 2 hosts" in outputs[0][0], "equal keys" + said_if_failed(outputs))
    checks.check("no key" not in outputs[0][0], "and no warning")
    variables = [{**kubeflow(pod, 2, "h1"), "LOCKSTEP_KEY_FILE": keys[2 * pod]} for pod in range(2)]
    pods = [start(cluster, pod, variables[pod], *run("--join-timeout", "3", "true")) for pod in range(2)]
    outputs = results(pods)
    checks.check("AUTH_FAILED" in outputs[1][0], f"another key is refused: {outputs}")
    checks.check("JOIN_TIMEOUT" in outputs[0][0] and "in pod 1 of 2" in outputs[0][0], f"and named: {outputs}")


def pod_that_comes_back_takes_part_in_the_restart(cluster):
    pods = start_launchers(cluster, "until_stop", options=("--max-restarts", "1"))
    pods[1].kill()
    pods[1].communicate()
    variables = kubeflow(1, PODS, "h1")
    pods[1] = start(cluster, 1, variables, *run("-n", "2", "--max-restarts", "1", *train("until_stop")))
    wait_for_output(pods[0], f"rank {2 * PODS - 1} pid")
    pods[0].send_signal(signal.SIGTERM)
    same_end("a restart", results(pods), 75, "cause=PREEMPTED", "gen=1")


def name_and_pods_come_late(cluster):
    """The last pod starts first; the name of the first is known after 20 s, and it starts after 55 s. The second starts
    after 90 s. The same with a rank, and with lockstep run, in each pod."""

    def start_both(pod):
        variables = [kubeflow(pod, PODS, "job-node-0-0.job", port=port) for port in ("23456", "23457")]
        ranks.append(start(cluster, pod, variables[0], *train("slow", "99")))
        launchers.append(start(cluster, pod, variables[1], *run("-n", "2", *train("slow", "99"))))

    ranks, launchers = [], []
    start_both(2)
    time.sleep(20)
    with open(f"{cluster.folder}/hosts", "a", encoding="ascii") as names:
        names.write(f"{host_cluster.SUBNET}1 job-node-0-0.job\n")
    time.sleep(35)
    start_both(0)
    time.sleep(35)
    start_both(1)
    for pods, missing in (ranks, "waits for 1 of 3 ranks"), (launchers, "waits for pod 1 of 3"):
        last, first, middle = results(pods)
        outputs = [first, middle, last]
        checks.check(all(code == 0 for _, code in outputs), "all join" + said_if_failed(outputs))
        checks.check("cannot resolve host" in last[0], "the pod that waits for the name says so")
        checks.check("cannot connect to" in last[0], "the pod that waits for the port says so")
        checks.check(missing in first[0], f"the first pod says who is missing: {first[0][-600:]}")


def killed_pod_is_named(cluster):
    variables = [kubeflow(pod, PODS, "h1") for pod in EACH_POD]
    pods = [start(cluster, pod, variables[pod], *train("until_stop")) for pod in EACH_POD]
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
    torchrun_reads_the_variables_itself,
    launchers_in_all_pods_are_one_job,
    launchers_take_their_number_of_ranks_from_the_pod,
    launchers_that_do_not_know_the_others_are_refused,
    killed_pod_ends_the_job,
    killed_launcher_ends_the_job,
    failing_rank_is_named_by_all,
    signal_to_any_pod_stops_the_job,
    pods_with_another_command_or_key_are_refused,
    pod_that_comes_back_takes_part_in_the_restart,
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
