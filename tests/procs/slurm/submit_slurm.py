#!/usr/bin/env python3
"""`lockstep submit` on a SLURM of two nodes, in a cell of its own: needs root and the packages slurm-wlm and munge.

submit_slurm.py --lockstep PATH [CASE...]; without cases all. Exit code 77: skipped.
"""

import argparse
import pathlib
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import host_cluster  # noqa: E402
import slurm_cluster  # noqa: E402

LIMIT = 90  # seconds for a job
# Ends with code 75 at SIGUSR1, and 7 when it was requeued.
LEAVES = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 7; trap "exit 75" USR1; echo ready; while :; do sleep 0.05; done'


def check(good, text):
    print(("ok: " if good else "FAILED: ") + text, flush=True)
    if not good:
        sys.exit(1)


class Workspace:
    """A folder to submit from."""

    def __init__(self, args, bed, folder):
        self.lockstep, self.bed, self.folder = args.lockstep, bed, pathlib.Path(folder)

    def words(self, *words):
        return [self.lockstep, "submit", *words]

    def submit(self, *words, **variables):
        done = subprocess.run(
            self.words(*words),
            cwd=self.folder,
            env={**self.bed.environment, **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def job_of(self, *words, **variables):
        code, out, err = self.submit(*words, **variables)
        check(code == 0 and "\nsubmitted batch job " in out, f"submitted {err}")
        return out.rpartition("\nsubmitted batch job ")[2].partition(";")[0]

    def log(self, job):
        path = self.folder / f"logs/{job}.out"
        return path.read_text() if path.exists() else ""

    def until_log_has(self, job, text):
        slurm_cluster.until(f"{text!r} is in the log of {job}", lambda: text in self.log(job), LIMIT)

    def until_state(self, job, *states):
        return slurm_cluster.until(
            f"{job} is {states}",
            lambda: (state := self.bed.state(job)) and state.get("JobState") in states and state,
            LIMIT,
        )


def job_is_followed_to_its_end(place):
    code, out, err = place.submit(
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
        sorted(line for line in after.splitlines() if "runs on" in line) == ran, f"the job's output is shown {after!r}"
    )
    check(
        [(place.folder / f"logs/{job}/rank.{rank}.out").read_text() for rank in (0, 3)]
        == ["runs on n1\n", "runs on n2\n"],
        "each rank has its log",
    )
    check("FAILED" in err, "and how it goes")
    check((place.folder / f"logs/{job}.sh").read_text() == shown.removesuffix("\n"), "the script is kept")
    check(place.bed.state(job)["JobName"] == "it", "SBATCH_JOB_NAME does not change what was shown")


def signal_before_the_limit_and_requeue(place):
    job = place.job_of("--time=10", "--ranks-per-node=1", "--", "bash", "-c", LEAVES)
    place.until_log_has(job, "ready")
    place.bed.ask("scancel", "--batch", "--signal=USR1", job)  # as SLURM does it: to the shell alone
    state = place.until_state(job, "FAILED")
    check(
        state["ExitCode"] == "7:0" and state["Restarts"] == "1",
        f"requeued once {state['ExitCode']} {state['Restarts']}",
    )
    log = place.log(job)
    check(
        "ready" in log
        and "FATAL cause=RANK_EXITED" in log
        and "requeued, because" in log
        and (place.folder / f"logs/{job}.1/rank.0.out").exists(),
        f"both runs are in the log {log!r}",
    )


def array_task_is_requeued(place):
    job = place.job_of(
        "--array=1-2",
        "--ranks-per-node=1",
        "--",
        "bash",
        "-c",
        'echo index $SLURM_ARRAY_TASK_ID; [ "$SLURM_ARRAY_TASK_ID${SLURM_RESTART_COUNT:-}" != 2 ] || exit 75',
    )
    for index, count in ((1, 1), (2, 2)):
        slurm_cluster.until(
            f"index {index} has run {count} times",
            lambda index=index, count=count: place.log(f"{job}_{index}").count(f"index {index}") == count,
            LIMIT,
        )
        place.until_state(f"{job}_{index}", "COMPLETED")
    check(
        place.bed.state(f"{job}_1")["Restarts"] == "0" and place.bed.state(f"{job}_2")["Restarts"] == "1",
        "the one that ended with code 75",
    )


def cancelled_job_stays_cancelled(place):
    job = place.job_of("--", "bash", "-c", 'trap "echo told; exit 75" TERM; echo ready; while :; do sleep 0.05; done')
    place.until_log_has(job, "ready")
    place.bed.ask("scancel", job)
    place.until_log_has(job, "told")
    slurm_cluster.until(
        "its processes have ended",
        lambda: place.bed.state(job).get("EndTime") and not place.bed.ask("squeue", "-h", "-j", job),
        LIMIT,
    )
    state = place.bed.state(job)
    check(
        state["JobState"] == "CANCELLED" and state["Restarts"] == "0" and "requeued" not in place.log(job),
        f"{state['JobState']}, not requeued",
    )


def script_submitted_manually_is_the_same_job(place):
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
    job = place.job_of(*options)
    script = (place.folder / f"my 100% 'logs'/{job}.sh").read_bytes()
    by_hand = (
        subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            cwd="/",
            env=place.bed.environment,
            capture_output=True,
            timeout=LIMIT,
            check=False,
        )
        .stdout.decode()
        .strip()
    )

    def fields(number):
        shown = (
            place.bed.ask("scontrol", "show", "job", number)
            .replace(f"JobId={number}", "JobId=N")
            .replace(f"logs'/{number}.out", "logs'/N.out")
        )
        return [
            line
            for line in shown.splitlines()
            if "Time=" not in line and "AllocNode" not in line and "Command=" not in line and "Priority=" not in line
        ]

    check("TimeLimit=1-02:03:00" in place.bed.ask("scontrol", "show", "job", job), "the limit")
    check(fields(by_hand) == fields(job), "sbatch reads the #SBATCH lines as it is told on its command line")
    comment = [line for line in fields(job) if "Comment=" in line]
    check(comment and "a \"b\" # c\\d 'e'" in comment[0], f"{comment}")
    place.bed.ask("scancel", job, by_hand)


def interrupt_ends_only_follow(place):
    follower = subprocess.Popen(
        place.words("--follow", "--", "bash", "-c", "echo ready; while [ ! -e go ]; do sleep 0.05; done"),
        cwd=place.folder,
        env=place.bed.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    shown = ""
    while "ready\n" not in shown and (line := follower.stdout.readline()):
        shown += line
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=LIMIT)
    job = shown.partition("submitted batch job ")[2].partition(";")[0]
    check(follower.returncode == 130 and f"job {job} goes on" in err, f"exit code {follower.returncode} {err}")
    check(place.bed.state(job)["JobState"] == "RUNNING", "it does")
    (place.folder / "go").touch()
    place.until_state(job, "COMPLETED")


def sbatch_errors_are_reported(place):
    code, _, err = place.submit("--partition=nowhere", "true")
    check(code == 64 and "invalid partition specified: nowhere" in err.rstrip().rpartition("\n")[2], err)
    code, _, err = place.submit("--nonsense", "--", "true")
    check(code == 64 and "--nonsense" in err, err)


CASES = {
    case.__name__: case
    for case in (
        job_is_followed_to_its_end,
        signal_before_the_limit_and_requeue,
        array_task_is_requeued,
        cancelled_job_stays_cancelled,
        script_submitted_manually_is_the_same_job,
        interrupt_ends_only_follow,
        sbatch_errors_are_reported,
    )
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    host_cluster.enter_sandbox(slurm_cluster.TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        bed = slurm_cluster.SlurmCluster(folder)
        for name in args.cases or list(CASES):
            with tempfile.TemporaryDirectory() as place:
                CASES[name](Workspace(args, bed, place))
        bed.close()


main()
