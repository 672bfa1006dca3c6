"""Processes that train a model on request: bench_gpu_step (step.cc) and pytorch_step.py."""

import contextlib
import json
import pathlib
import resource
import select
import signal
import subprocess

from results import Failed, Refused
from stage import OutOfTime

HERE = pathlib.Path(__file__).resolve().parent
# Arguments of bench_gpu_step. A world of one rank uses NCCL only in lockstep-nccl; PyTorch's DistributedDataParallel
# always does.
LOCKSTEP = ["lockstep", "lockstep-fused", "lockstep-graph", "lockstep-nccl"]
PYTORCH = ["pytorch-ddp", "pytorch-ddp-fused", "pytorch-graph", "pytorch-compile", "pytorch-overhead"]


class OutOfMemory(Exception):
    """A training needs more memory than there is."""


class Worker:
    """One process with one implementation and model. make() and run() send a request and wait for its result."""

    def __init__(self, context, impl, model, environment=None, memory_limit=0):
        words = [model, "tiny" if context.tiny else "full", context.device, str(context.threads)]
        if impl in LOCKSTEP:
            words = [str(context.program("bench_gpu_step")), impl, *words]
        else:
            words = [context.python, str(HERE / "pytorch_step.py"), impl, *words]
        self.impl, self.context = impl, context
        context.logs.mkdir(parents=True, exist_ok=True)
        with open(context.logs / f"worker-{model}-{impl}.log", "ab") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=context.environment(**(environment or {}), **context.synchronization_counter()),
                preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit)))
                if memory_limit
                else None,
            )

    def send(self, *words):
        """Sends a request. receive() waits for its result."""
        with contextlib.suppress(BrokenPipeError):  # receive() finds the reason
            self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
            self.process.stdin.flush()

    def receive(self, timeout=180):
        """Returns the result of the request. Raises Refused, Failed, OutOfMemory or OutOfTime."""
        allowed = min(timeout, self.context.remaining())
        if not select.select([self.process.stdout], [], [], max(allowed, 0))[0]:
            self.process.kill()
            if allowed < timeout:
                raise OutOfTime
            raise Failed(f"{self.impl} printed nothing for {timeout} s")
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            if code == -signal.SIGKILL:
                raise OutOfMemory("killed")
            raise Failed(f"{self.impl} exited with {code}; see its log")
        result = json.loads(line)
        if "failed" in result:
            raise Failed(f"{self.impl}: {result['failed']}")
        if "refused" in result:
            raise Refused(result["refused"])
        if "out_of_memory" in result:
            raise OutOfMemory(result["out_of_memory"])
        return result

    def make(self, precision, batch):
        self.send("make", precision, batch)
        return self.receive()

    def run(self, warm_up, measured):
        self.send("run", warm_up, measured)
        return self.receive()

    def data_bytes(self):
        """Returns the bytes of private memory that the process has, which its memory_limit limits."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))

    def drop(self):
        """Lets the process give the memory of its training back."""
        self.send("drop")
        self.receive()

    def alive(self):
        return self.process.poll() is None

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20 if self.context.remaining() > 20 else 0.1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
