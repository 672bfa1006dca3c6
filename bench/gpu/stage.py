"""What the stages of the GPU proof share: their rows, the time that is left, and the commands that they run."""

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable

from results import Failed, Refused

FIRST, LATER, LAST = range(3)


class OutOfTime(Exception):
    """The limit of this call was reached during a row, which a later call repeats."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement or test. `seconds` is what it is expected to take: it is not started with less time left. Rows of
    all stages run in the order of their `worth`. With `repeat` it runs in every call."""

    name: str
    seconds: float
    run: Callable[[], dict]
    worth: int = FIRST
    repeat: bool = False


class Context:
    """The options of the proof, the machine, and what it lacks."""

    def __init__(self, args, head, begin):
        """`begin`: when this call began, in time.monotonic(), to which its limit refers."""
        self.device, self.tiny, self.python = args.device, args.tiny, args.python
        self.build, self.deps, self.jobs = args.build, args.deps, args.jobs
        self.nccl, self.out, self.logs = args.nccl, args.out, args.out / "logs"
        self.lacks = head["lacks"]
        self.gpu_bytes = head.get("gpu_bytes")
        self.threads = 1 if args.tiny else max(1, min(4, args.jobs))  # of each process that trains
        self.ends = begin + args.limit

    def program(self, name):
        """Returns the path of a program: those that load CUDA are not in bin/."""
        path = self.build / "cuda" / name
        return path if path.exists() else self.build / "bin" / name

    def synchronization_counter(self):
        """Returns the variable with which a program counts how often it waits for the device."""
        library = self.build / "cuda/libcount_synchronizations.so"
        return {"LD_PRELOAD": str(library)} if self.device == "cuda" and library.exists() else {}

    def fake_gpu(self, gpus):
        """Returns assignments of variables with which a program sees `gpus` fake GPUs."""
        library = self.build / "tests/support/libfake_gpu.so"
        if not library.exists():
            raise Refused("the fake GPU has not been built: this libtorch has no CUDA headers")
        return [f"FAKE_GPUS={gpus}", f"LD_PRELOAD={library}"]

    def remaining(self):
        return self.ends - time.monotonic()

    def require(self, *names):
        """Raises Refused with the reason if the machine lacks one of `names`."""
        for name in names:
            if name in self.lacks:
                raise Refused(f"{name}: {self.lacks[name]}")

    def environment(self, **more):
        """Returns the environment of a command."""
        # A rank that hangs is named before the row's own limit ends it.
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "LOCKSTEP_TIMEOUT": "30", **more}

    def run(self, log, words, *, timeout, env=None, cwd=None, check=True):
        """Runs a command and writes its output to logs/LOG. Returns (exit code, output).

        Raises Failed if it takes longer than `timeout`, or with `check` if it fails; OutOfTime if the limit of the call
        comes first. All processes of the command are then killed.
        """
        allowed = min(timeout, self.remaining())
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.log"
        with open(path, "wb") as file:
            process = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env or self.environment(),
                cwd=cwd,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=max(allowed, 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if allowed < timeout:
                    raise OutOfTime from None
                raise Failed(f"no end within {timeout} s", log=path.name) from None
        text = path.read_text(errors="replace")
        if check and code != 0:
            raise Failed(f"exit code {code}: {last_words(text)}", log=path.name)
        return code, text


def last_words(text, count=400):
    """Returns the end of an output, in one piece for a row."""
    return " | ".join(part.strip() for part in text.strip().splitlines()[-4:])[-count:]
