#!/usr/bin/env python3
"""Tests the batch scripts of `lockstep submit` with bash and fake versions of lockstep, scontrol and sbatch.

Usage: submit.py --lockstep PATH [CASE...]. The default is all cases. SLURM is not required.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from checks import check, parse_arguments, wait_until  # noqa: E402

LIMIT_S = 240  # for each process
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "unit/launch/slurm/sbatch"

# Writes its arguments to the file `words`, and executes the program.
FAKE_LOCKSTEP = """#!/bin/bash
printf '%s\\0' "$@" >words
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
# Appends its arguments to a file, one line per call.
FAKE_SCONTROL = '#!/bin/bash\necho "$@" >>scontrol.calls\n'
# Writes its arguments and its input to files, and runs the file `answer`.
FAKE_SBATCH = "#!/bin/bash\nprintf '%s\\0' \"$@\" >sbatch.words\ncat >sbatch.input\n. ./answer\n"

# Counts its signals, creates the file `ready`, and exits with the code that it reads from its pipe.
COUNTING = """
import pathlib, signal, sys
counts = {"USR1": 0, "TERM": 0}
def count(number, frame):
    counts[signal.Signals(number).name[3:]] += 1
    pathlib.Path("counts").write_text(str(counts))
signal.signal(signal.SIGUSR1, count)
signal.signal(signal.SIGTERM, count)
pathlib.Path("ready").touch()
sys.exit(int(open("pipe").readline()))
"""

# Ignores both signals, and exits with the code that it reads from its pipe.
IGNORING = 'trap "" USR1 TERM; touch ready; read -r code <pipe; exit "$code"'


def sleeps_and_catches_term(pid):
    """Returns whether a process sleeps and has a handler for SIGTERM."""
    status = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return status["State"].startswith("S") and int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1


class Workspace:
    """A folder with the fake programs, which are first in PATH."""

    def __init__(self, args, folder):
        self.lockstep = args.lockstep
        self.folder = pathlib.Path(folder)
        for name, text in (
            ("lockstep", FAKE_LOCKSTEP),
            ("scontrol", FAKE_SCONTROL),
            ("sbatch", FAKE_SBATCH),
        ):
            path = self.folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
        os.mkfifo(self.folder / "pipe")

    def submit(self, *words, path=None):
        environment = {**self.environment, **({} if path is None else {"PATH": path})}
        done = subprocess.run(
            [self.lockstep, "submit", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        done.stdout, done.stderr = os.fsdecode(done.stdout), os.fsdecode(done.stderr)
        return done

    def start(self, *words, **variables):
        """Runs the script that submit prints, with bash."""
        script = self.submit("--dry-run", "--remote-path", "bin/lockstep", *words)
        assert script.returncode == 0, script.stderr
        (self.folder / "script").write_bytes(os.fsencode(script.stdout))
        return subprocess.Popen(
            ["bash", "script"],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words, **variables):
        job = self.start(*words, **variables)
        job.communicate(timeout=LIMIT_S)
        return job.returncode

    def start_program(self, *words):
        """Starts a program that creates the file `ready`. Returns when bash waits for it."""
        (self.folder / "ready").unlink(missing_ok=True)
        (self.folder / "counts").unlink(missing_ok=True)
        job = self.start(*words)
        wait_until((self.folder / "ready").exists, "the program does not run", LIMIT_S)
        wait_until(lambda: sleeps_and_catches_term(job.pid), "the shell does not wait with its traps set", LIMIT_S)
        return job

    def end(self, job, code):
        with open(self.folder / "pipe", "w", encoding="ascii") as pipe:
            pipe.write(f"{code}\n")
        job.communicate(timeout=LIMIT_S)
        return job.returncode

    def words(self):
        return (self.folder / "words").read_bytes().split(b"\0")[:-1]

    def requeued(self):
        calls = self.folder / "scontrol.calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def counts(self):
        path = self.folder / "counts"
        return path.read_text() if path.exists() else ""


def example_scripts_parse(_):
    names = sorted(EXAMPLES.glob("*.sh"))
    check(
        names
        and all(subprocess.run(["bash", "-n", name], check=False, timeout=LIMIT_S).returncode == 0 for name in names),
        f"bash parses {len(names)} examples",
    )


def exit_code_is_kept(workspace):
    for options in ((), ("--no-requeue",), ("--signal-before=0",), ("--no-requeue", "--signal-before=0")):
        for code in (0, 1, 7, 74, 255):
            check(workspace.run(*options, "--", "bash", "-c", f"exit {code}") == code, f"code {code} {options}")
        killed = workspace.run(*options, "--", "bash", "-c", "kill -KILL $$")
        check(killed in (137, -9), f"code {killed} of a program that was killed {options}")
    check(not workspace.requeued(), "no job was requeued")


def code_75_is_requeued(workspace):
    check(
        workspace.run("--no-requeue", "--", "bash", "-c", "exit 75") == 75 and not workspace.requeued(),
        "not with --no-requeue",
    )
    check(
        workspace.run("--", "bash", "-c", "exit 75") == 75 and workspace.requeued() == ["requeue 4711"],
        f"once {workspace.requeued()}",
    )
    workspace.run("--array=3", "--", "bash", "-c", "exit 75", SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID="3")
    check(workspace.requeued()[1:] == ["requeue 42_3"], f"one task of an array {workspace.requeued()}")


def environment_is_prepared(workspace):
    program = ("--", "bash", "-c", 'echo "$prepared" >said')
    code = workspace.run("--before", "prepared=$unset_is_no_error; export prepared=yes", *program)
    check(code == 0 and (workspace.folder / "said").read_text() == "yes\n", "the program has the environment")
    (workspace.folder / "said").unlink()
    code = workspace.run("--before", "true # or", "--before=(exit 3) # not", *program)
    check(code == 3 and not (workspace.folder / "said").exists(), f"a command that fails ends the job: {code}")


def tasks_of_a_grid_have_their_arguments(workspace):
    options = ("--grid", "lr=0.1,0.01", "--grid", "note=a b,$c", "--", "true", "first")
    found = []
    for task in range(4):
        workspace.run(*options, SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID=str(task))
        found.append(workspace.words()[-2:])
    expected = [[b"--lr=" + lr, b"--note=" + note] for lr in (b"0.1", b"0.01") for note in (b"a b", b"$c")]
    check(found == expected, f"{found}")


def log_folder_is_named_after_job(workspace):
    def output():
        return workspace.words()[1]

    workspace.run("true")
    check(output() == b"--output=logs/4711", str(output()))
    workspace.run("true", SLURM_RESTART_COUNT="2")
    check(output() == b"--output=logs/4711.2", f"a job that was requeued does not overwrite {output()}")
    workspace.run("--array=3", "--output=my 'logs'", "true", SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID="3")
    check(output() == b"--output=my 'logs'/42_3", str(output()))


def arguments_are_unchanged(workspace):
    rng = random.Random(1)
    letters = [chr(code) for code in range(1, 128)] + [
        "ü",
        "漢",
        "😀",
        "\u2028",
        "$(",
        "${",
        "\\\n",
        "\r\n",
        "!!",
        "#SBATCH",
        "--",
        "~/",
        "'\\''",
    ]
    special = [
        "",
        " ",
        "'",
        '"',
        "\\",
        "$(touch x)",
        "`touch x`",
        "$HOME",
        "${PATH}",
        "a\nb",
        "\n",
        "\r\n",
        "*",
        "?",
        "~",
        "-n",
        "--",
        "&",
        ";",
        "|",
        ">",
        "<",
        "#",
        "!",
        "a=b",
        "\x01",
        "\x7f",
        "\u00e9",
        "\udcff\udcfe",
        "$'a'",
        "\\n",
        "\t",
        "(",
        ")",
        "{a,b}",
        "[ab]",
    ]
    special += ["".join(rng.choices(letters, k=rng.randint(1, 20))) for _ in range(165)]
    workspace.run("--run=-n2", "--", "true", *special)
    check(
        workspace.words()
        == [os.fsencode(word) for word in ("run", "--output=logs/4711", "-n2", "--", "true", *special)],
        f"{len(special)} arguments",
    )
    check(not (workspace.folder / "x").exists(), "no argument was executed")
    script = (workspace.folder / "script").read_bytes()
    check(b"\r" not in script, "sbatch rejects carriage returns")


def usr1_reaches_the_program(workspace):
    for code in (7, 75, 0):
        job = workspace.start_program("--", sys.executable, "-c", COUNTING)
        for count in (1, 2, 3):
            job.send_signal(signal.SIGUSR1)
            wait_until(
                lambda count=count: f"'USR1': {count}" in workspace.counts(), "the program has no signal", LIMIT_S
            )
        check(job.poll() is None, "the shell still waits")
        check(workspace.end(job, code) == code, f"code {code} after three signals")
    check(workspace.requeued() == ["requeue 4711"], f"requeued once {workspace.requeued()}")


def sigterm_is_not_forwarded_or_requeued(workspace):
    for options in ((), ("--signal-before=0",), ("--no-requeue",)):
        job = workspace.start_program(*options, "--", sys.executable, "-c", COUNTING)
        job.send_signal(signal.SIGTERM)
        check(workspace.end(job, 75) == 75, "code 75 after SIGTERM")
        check(
            workspace.counts() == "" and not workspace.requeued(),
            f"the shell forwards and requeues nothing {options} {workspace.counts()} {workspace.requeued()}",
        )


def signals_do_not_change_exit_code(workspace):
    """Includes the moment in which the program ends: wait is interrupted after the exit code is available."""
    rng = random.Random(2)
    for code in range(1, 41):
        job = workspace.start_program("--no-requeue", "--", "bash", "-c", IGNORING)
        with open(workspace.folder / "pipe", "w", encoding="ascii") as pipe:
            pipe.write(f"{code}\n")
        while job.poll() is None:
            job.send_signal(rng.choice((signal.SIGUSR1, signal.SIGTERM)))
            time.sleep(rng.random() * 0.001)
        _, err = job.communicate(timeout=LIMIT_S)
        if job.returncode != code:
            check(False, f"code {job.returncode} instead of {code}: {err}")
    check(True, "40 codes")


def sbatch_gets_script_and_options(workspace):
    (workspace.folder / "answer").write_text("echo '4711;alps'\n")
    (workspace.folder / "train").write_text("")
    (workspace.folder / "train").chmod(0o755)
    done = workspace.submit("--nodes=2", "--qos=high", "--comment", "a b", "--output=my/logs", "--", "./train", "x y")
    check(
        done.returncode == 0 and "submitted batch job 4711; its output: my/logs/4711.out\n" in done.stdout,
        done.stdout[-80:] + done.stderr,
    )
    script = (workspace.folder / "sbatch.input").read_text()
    check(
        done.stdout.startswith(script) and script.startswith("#!/bin/bash\n#"), "it prints the script that it submits"
    )
    check((workspace.folder / "my/logs/4711.sh").read_text() == script, "it keeps the script")
    words = (workspace.folder / "sbatch.words").read_text().split("\0")[:-1]
    check(
        words[:3] == ["--parsable", "--job-name=train", "--nodes=2"]
        and words[-3:] == ["--qos=high", "--comment", "a b"],
        json.dumps(words),
    )


def errors_are_one_line(workspace):
    def last_line(done, code=64):
        line = done.stderr.rstrip("\n").rpartition("\n")[2]
        check(done.returncode == code and line.startswith("FATAL cause="), f"code {done.returncode}: {line}")
        return line

    (workspace.folder / "answer").write_text(
        "echo 'sbatch: error: invalid partition specified: x' >&2\n"
        "echo 'sbatch: error: Batch job submission failed' >&2; exit 1\n"
    )
    check(
        "code 1: sbatch: error: invalid partition specified: x; sbatch: error: Batch job"
        in last_line(workspace.submit("-px", "true")),
        "the error contains the message of sbatch",
    )
    (workspace.folder / "answer").write_text("echo hello\n")
    check("hello" in last_line(workspace.submit("true")), "the error contains an output that is not a number")
    check("SLURM is not installed here" in last_line(workspace.submit("true", path="/nowhere")), "no sbatch")
    check("./nothing" in last_line(workspace.submit("--", "./nothing")), "no such program")
    check(workspace.submit("--dry-run", "--", "./nothing", path="/nowhere").returncode == 0, "--dry-run needs neither")
    (workspace.folder / "file").write_text("")
    check(
        "--output" in last_line(workspace.submit("--output=file/logs", "true"), 74), "a folder that cannot be created"
    )
    check("--nodes" in last_line(workspace.submit("--nodes=x", "true")), "an invalid option")
    line = last_line(workspace.submit("--dry-run", "--before", "if true", "--", "true"))
    check("--before is" in line and "syntax error" in line, f"a command that bash cannot read: {line}")
    check("the program is" in last_line(workspace.submit("--", ":", "--", "true")), "a colon is no program")


CASES = {
    case.__name__: case
    for case in (
        example_scripts_parse,
        exit_code_is_kept,
        code_75_is_requeued,
        environment_is_prepared,
        tasks_of_a_grid_have_their_arguments,
        log_folder_is_named_after_job,
        arguments_are_unchanged,
        usr1_reaches_the_program,
        sigterm_is_not_forwarded_or_requeued,
        signals_do_not_change_exit_code,
        sbatch_gets_script_and_options,
        errors_are_one_line,
    )
}


def main():
    args = parse_arguments("lockstep")
    for name in args.cases or list(CASES):
        with tempfile.TemporaryDirectory() as folder:
            CASES[name](Workspace(args, folder))


main()
