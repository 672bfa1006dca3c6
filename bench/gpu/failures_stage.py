"""Stage failures: a rank on the GPU is killed, stopped, looping, out of step, or out of memory; the job must end, name
the cause and the rank, and leave neither a process nor memory of the GPU."""

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import time

from machine import ROOT, output_of
from results import Failed, Refused
from stage import OutOfTime, Row, last_words

sys.path.insert(0, str(ROOT / "tests/support"))
from tagged_processes import find_tagged  # noqa: E402

MARK = "LOCKSTEP_GPU_PROOF"
RANKS = 2
LIMITS = ["--hang-timeout", "5", "--work-timeout", "5", "--stall-timeout", "5"]
GPU_MEMORY_LEFT = 64 << 20
# Fault: (cause, exit code, seconds from the fault to the end of the launcher)
FAULTS = {
    "SIGKILL": ("RANK_DIED", 137, 8),
    "SIGSTOP": ("RANK_STALLED", 124, 14),
    "loop": ("RANK_STUCK", 124, 14),
    "desync": ("DESYNC", 70, 8),
    "memory": ("RESOURCE", 74, 8),
    "device": ("RANK_EXITED", 1, 8),
}
FAULT_STEP = 20


class Job:
    """One job with one fault."""

    def __init__(self, context, fault, number):
        self.context, self.fault, self.victim = context, fault, number % RANKS
        self.name = f"failure-{fault}-{number}"
        self.mark = f"{os.getpid()}.{self.name}"

    def words(self):
        inside = self.fault if self.fault in ("desync", "memory", "device") else "none"
        words = [self.context.program("lockstep"), "run", "-n", RANKS, "--bind", "none", "--share-gpus", *LIMITS]
        if self.fault == "loop":
            words += ["--inject", f"loop@rank={self.victim},step={FAULT_STEP}"]
        words.append("--")
        if self.context.device == "cpu":
            words += ["env", *self.context.fake_gpu(RANKS)]
        words += [self.context.program("procs_gpu_fault_probe"), inside, self.victim, FAULT_STEP]
        return [str(word) for word in words]

    def run(self):
        """Returns what was wrong, and the seconds from the fault to the end."""
        path = self.context.logs / f"{self.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as log:
            job = subprocess.Popen(
                self.words(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.context.environment(**{MARK: self.mark}),
            )
        try:
            began = self.disturb(job, path)
            code = job.wait(timeout=max(1, min(60, self.context.remaining())))
        except subprocess.TimeoutExpired:
            if self.context.remaining() < 1:
                raise OutOfTime from None
            return [f"{self.name}: the launcher did not end"], None
        finally:
            left = [pid for pid in find_tagged(MARK, self.mark) if pid != job.pid]
            for pid in [*left, *([job.pid] if job.poll() is None else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
        seconds = time.monotonic() - began
        return self.judge(code, path.read_text(errors="replace"), seconds, left), round(seconds, 2)

    def disturb(self, job, path):
        """Waits until all ranks train, injects a fault from outside, and returns the time of the fault."""
        end = time.monotonic() + min(120, self.context.remaining())
        pids = {}
        while len(pids) < RANKS:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("start", 0)
            if job.poll() is not None:
                break  # the fault came early; judge() sees whether it was the right one
            pids = dict(re.findall(r"\[(\d+)\] (\d+) is training", path.read_text(errors="replace")))
            time.sleep(0.02)
        if self.fault in ("SIGKILL", "SIGSTOP") and pids:
            os.kill(int(pids[str(self.victim)]), getattr(signal, self.fault))
        return time.monotonic()

    def judge(self, code, text, seconds, left):
        cause, expected_code, limit = FAULTS[self.fault]
        fatal = re.findall(r"^FATAL cause=(\w+) rank=(\S+)", text, re.M)
        wrong = []
        if code != expected_code:
            wrong.append(f"exit code {code}, not {expected_code}")
        if [found for found, _ in fatal] != [cause]:
            wrong.append(f"FATAL lines {fatal}, not {cause}: {last_words(text)}")
        elif cause != "DESYNC" and fatal[0][1] != str(self.victim):
            wrong.append(f"rank {fatal[0][1]} is blamed, not {self.victim}")
        if cause == "DESYNC" and f"rank {self.victim} " not in last_words(text, 2000):
            wrong.append("the FATAL line does not name the rank")
        if seconds > limit:
            wrong.append(f"ended after {seconds:.1f} s, not {limit} s")
        if left:
            wrong.append(f"processes were left: {left}")
        return [f"{self.name}: {one}" for one in wrong]


def gpu_memory_used():
    """Returns the bytes of GPU memory that are in use, or None if nvidia-smi does not say."""
    text = output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return int(text.splitlines()[0]) << 20 if text and text.splitlines()[0].isdigit() else None


def wait_for_memory(before):
    """Returns the memory that is still in use, after the driver has had time to free that of ended processes."""
    for _ in range(50):
        now = gpu_memory_used()
        if now is None or now - before <= GPU_MEMORY_LEFT:
            break
        time.sleep(0.1)
    return now


def inject(context, fault, runs):
    if context.device == "cuda" and not context.program("procs_gpu_fault_probe").exists():
        raise Refused("procs_gpu_fault_probe has not been built")
    before = gpu_memory_used() if context.device == "cuda" else None
    # Few at a time: ranks that all make their first call of CUDA together may seem to hang.
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(2, context.jobs // 3))) as pool:
        results = list(pool.map(lambda number: Job(context, fault, number).run(), range(runs)))
    wrong = [text for errors, _ in results for text in errors]
    seconds = [taken for _, taken in results if taken is not None]
    result = {"fault": fault, "cause": FAULTS[fault][0], "runs": runs, "ended_seconds": seconds}
    if before is not None:
        after = wait_for_memory(before)
        result["gpu_memory_left_bytes"] = after - before
        if after - before > GPU_MEMORY_LEFT:
            wrong.append(f"{(after - before) >> 20} MiB of the GPU's memory are still in use")
    result["good"] = runs - len({text.split(":")[0] for text in wrong if text.startswith("failure-")})
    if wrong:
        raise Failed("; ".join(wrong)[:2000], **result)
    return result


def rows(context):
    runs = 1 if context.tiny else 5
    for fault in FAULTS:
        yield Row(f"{fault}, {runs} runs", 20 if context.tiny else 30, lambda f=fault: inject(context, f, runs))
