#!/usr/bin/env python3
"""Tests `lockstep submit` with a SLURM of two nodes in a sandbox. Requires root and the packages slurm-wlm and munge.

Usage: submit_slurm.py --lockstep PATH [CASE...]. The default is all cases. The exit code is 77 if the machine lacks
what they require.
"""

import pathlib
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import slurm_cluster  # noqa: E402
from checks import check, parse_arguments, wait_until  # noqa: E402

LIMIT_S = 240  # for one job
# Exits with code 75 on SIGUSR1, and with 7 after it was requeued.
LEAVE_ON_USR1 = (
    '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 7; trap "exit 75" USR1; echo ready; while :; do sleep 0.05; done'
)


class Workspace:
    """A folder to submit from."""

    def __init__(self, args, cluster, folder):
        self.lockstep, self.cluster, self.folder = args.lockstep, cluster, pathlib.Path(folder)

    def words(self, *words):
        return [self.lockstep, "submit", *words]

    def submit(self, *words, **variables):
        done = subprocess.run(
            self.words(*words),
            cwd=self.folder,
            env={**self.cluster.environment, **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def submit_job(self, *words, **variables):
        """Submits a job. Returns its number."""
        code, out, err = self.submit(*words, **variables)
        check(code == 0 and "\nsubmitted batch job " in out, f"submitted {err}")
        return out.rpartition("\nsubmitted batch job ")[2].partition(";")[0]

    def log(self, job):
        path = self.folder / f"logs/{job}.out"
        return path.read_text() if path.exists() else ""

    def until_log_has(self, job, text):
        wait_until(lambda: text in self.log(job), f"{text!r} is not in the log of {job}", LIMIT_S)

    def until_state(self, job, *states):
        return wait_until(
            lambda: (state := self.cluster.state(job)) and state.get("JobState") in states and state,
            f"{job} is not {states}",
            LIMIT_S,
        )


def job_is_followed_to_its_end(workspace):
    code, out, err = workspace.submit(
        "--nodes=2",
        "--ranks-per-node=2",
        "--name=it",
        "--follow",
        "--",
        "bash",
        "-c",
        "echo runs on $SLURMD_NODENAME; sleep 1; exit 7",
        SBATCH_JOB_NAME="other",
    )
    check(code == 7, f"exit code {code} {err}")
    shown, _, after = out.partition("submitted batch job ")
    job = after.partition(";")[0]
    ran = [f"[n{node}:{rank}] runs on n{node}" for node, rank in ((1, 0), (1, 1), (2, 2), (2, 3))]
    check(
        sorted(line for line in after.splitlines() if "runs on" in line) == ran,
        f"the output of the job is printed {after!r}",
    )
    check(
        [(workspace.folder / f"logs/{job}/rank.{rank}.out").read_text() for rank in (0, 3)]
        == ["runs on n1\n", "runs on n2\n"],
        "each rank has its log",
    )
    check("FAILED" in err, "the state of the job is printed")
    check((workspace.folder / f"logs/{job}.sh").read_text() == shown.removesuffix("\n"), "the script is kept")
    check(workspace.cluster.state(job)["JobName"] == "it", "SBATCH_JOB_NAME does not override the printed script")


def signal_before_the_limit_and_requeue(workspace):
    job = workspace.submit_job("--time=10", "--ranks-per-node=1", "--", "bash", "-c", LEAVE_ON_USR1)
    workspace.until_log_has(job, "ready")
    workspace.cluster.run_client("scancel", "--batch", "--signal=USR1", job)  # as SLURM does: only to the shell
    state = workspace.until_state(job, "FAILED")
    check(
        state["ExitCode"] == "7:0" and state["Restarts"] == "1",
        f"requeued once {state['ExitCode']} {state['Restarts']}",
    )
    log = workspace.log(job)
    check(
        "ready" in log
        and "FATAL cause=RANK_EXITED" in log
        and "requeued, because" in log
        and (workspace.folder / f"logs/{job}.1/rank.0.out").exists(),
        f"the log contains both runs {log!r}",
    )


def array_task_is_requeued(workspace):
    job = workspace.submit_job(
        "--array=1-2",
        "--ranks-per-node=1",
        "--",
        "bash",
        "-c",
        'echo index $SLURM_ARRAY_TASK_ID; [ "$SLURM_ARRAY_TASK_ID${SLURM_RESTART_COUNT:-}" != 2 ] || exit 75',
    )
    for index, count in ((1, 1), (2, 2)):
        wait_until(
            lambda index=index, count=count: workspace.log(f"{job}_{index}").count(f"index {index}") == count,
            f"index {index} has not run {count} times",
            LIMIT_S,
        )
        workspace.until_state(f"{job}_{index}", "COMPLETED")
    check(
        workspace.cluster.state(f"{job}_1")["Restarts"] == "0"
        and workspace.cluster.state(f"{job}_2")["Restarts"] == "1",
        "only the task that exited with code 75 is requeued",
    )


def tasks_of_a_grid_run_with_their_environment(workspace):
    job = workspace.submit_job(
        "--nodes=2",
        "--ranks-per-node=1",
        "--before",
        "export prepared=yes",
        "--grid",
        "lr=0.1,0.01",
        "--",
        "bash",
        "-c",
        'echo "$prepared $0 on $SLURMD_NODENAME"',
    )
    for task, rate in ((0, "0.1"), (1, "0.01")):
        workspace.until_state(f"{job}_{task}", "COMPLETED")
        log = workspace.log(f"{job}_{task}")
        ran = [f"yes --lr={rate} on n{node}" for node in (1, 2)]
        check(all(line in log for line in ran) and f"{job}_{task}: --lr={rate}" in log, f"task {task}: {log!r}")


def cancelled_job_stays_cancelled(workspace):
    job = workspace.submit_job(
        "--", "bash", "-c", 'trap "echo asked; exit 75" TERM; echo ready; while :; do sleep 0.05; done'
    )
    workspace.until_log_has(job, "ready")
    workspace.cluster.run_client("scancel", job)
    workspace.until_log_has(job, "asked")
    wait_until(
        lambda: (
            workspace.cluster.state(job).get("EndTime") and not workspace.cluster.run_client("squeue", "-h", "-j", job)
        ),
        "its processes have not ended",
        LIMIT_S,
    )
    state = workspace.cluster.state(job)
    check(
        state["JobState"] == "CANCELLED" and state["Restarts"] == "0" and "requeued" not in workspace.log(job),
        f"{state['JobState']}, not requeued",
    )


def script_submitted_manually_is_the_same_job(workspace):
    options = (
        "--hold",
        "--nodes=1-2",
        "--ranks=2",
        "--cpus-per-rank=1",
        "--mem=100M",
        "--time=1-2:3",
        "--partition=p",
        "--name=it",
        "--signal-before=600",
        "--output=my 100% 'logs'",
        "--comment",
        "a \"b\" # c\\d 'e'",
        "--",
        "true",
    )
    job = workspace.submit_job(*options)
    script = (workspace.folder / f"my 100% 'logs'/{job}.sh").read_bytes()
    by_hand = (
        subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            cwd="/",
            env=workspace.cluster.environment,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        .stdout.decode()
        .strip()
    )

    def fields(number):
        shown = (
            workspace.cluster.run_client("scontrol", "show", "job", number)
            .replace(f"JobId={number}", "JobId=N")
            .replace(f"logs'/{number}.out", "logs'/N.out")
        )
        return [
            line
            for line in shown.splitlines()
            if "Time=" not in line and "AllocNode" not in line and "Command=" not in line and "Priority=" not in line
        ]

    check("TimeLimit=1-02:03:00" in workspace.cluster.run_client("scontrol", "show", "job", job), "the time limit")
    check(fields(by_hand) == fields(job), "sbatch reads the #SBATCH lines like its command line")
    comment = [line for line in fields(job) if "Comment=" in line]
    check(comment and "a \"b\" # c\\d 'e'" in comment[0], f"{comment}")
    workspace.cluster.run_client("scancel", job, by_hand)


def interrupt_ends_only_follow(workspace):
    follower = subprocess.Popen(
        workspace.words("--follow", "--", "bash", "-c", "echo ready; while [ ! -e go ]; do sleep 0.05; done"),
        cwd=workspace.folder,
        env=workspace.cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    shown = ""
    while "ready\n" not in shown and (line := follower.stdout.readline()):
        shown += line
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=LIMIT_S)
    job = shown.partition("submitted batch job ")[2].partition(";")[0]
    check(follower.returncode == 130 and f"job {job} keeps running" in err, f"exit code {follower.returncode} {err}")
    check(workspace.cluster.state(job)["JobState"] == "RUNNING", "the job is running")
    (workspace.folder / "go").touch()
    workspace.until_state(job, "COMPLETED")


def sbatch_errors_are_reported(workspace):
    code, _, err = workspace.submit("--partition=nowhere", "true")
    check(code == 64 and "invalid partition specified: nowhere" in err.rstrip().rpartition("\n")[2], err)
    code, _, err = workspace.submit("--nonsense", "--", "true")
    check(code == 64 and "--nonsense" in err, err)


CASES = {
    case.__name__: case
    for case in (
        job_is_followed_to_its_end,
        signal_before_the_limit_and_requeue,
        array_task_is_requeued,
        tasks_of_a_grid_run_with_their_environment,
        cancelled_job_stays_cancelled,
        script_submitted_manually_is_the_same_job,
        interrupt_ends_only_follow,
        sbatch_errors_are_reported,
    )
}


def main():
    args = parse_arguments("lockstep")
    host_cluster.enter_sandbox(slurm_cluster.TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        cluster = slurm_cluster.SlurmCluster(folder)
        for name in args.cases or list(CASES):
            with tempfile.TemporaryDirectory() as workspace:
                CASES[name](Workspace(args, cluster, workspace))
        cluster.close()


main()
