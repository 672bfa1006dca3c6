"""What the machine is, and what it lacks of what the GPU proof uses."""

import ctypes
import hashlib
import json
import mmap
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile

from results import read_rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ["CMakeLists.txt", "cmake", "lockstep", "programs", "bench", "examples", "tests"]


def output_of(*words, timeout=60):
    """Returns what a command prints, or "" if it is missing or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def source_hash():
    """Returns a hash of all sources that a build reads, so that the proof knows its commit without git."""
    found = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


TORCH_FACTS = """
import json, torch
facts = {"libtorch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    facts.update(gpu=torch.cuda.get_device_name(), nccl=".".join(map(str, torch.cuda.nccl.version())))
    facts["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
print(json.dumps(facts))
"""


def _boot():
    """Returns what tells this machine, since its start, from others."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {path.read_text().strip() if path.exists() else ''}"


def describe(python, device, tiny):
    """Returns the first row of the results file."""
    facts = json.loads(output_of(python, "-c", TORCH_FACTS, timeout=120) or "{}") if python else {}
    smi = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "source": source_hash(),
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty") or None,
        "gpu": facts.pop("gpu", None) if device == "cuda" else "none (fake CUDA)",
        "driver": smi[0] if smi else None,
        "kernel": f"{platform.system()} {platform.release()}",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "nvcc": (output_of("nvcc", "--version").splitlines() or [None])[-1],
        "compiler": (output_of("c++", "--version").splitlines() or [None])[0],
        "tiny": tiny,
        "boot": _boot(),
        "libtorch": None,
        "nccl": None,
        **facts,
    }


def _try_in_child(function):
    """Returns None if function() returns in a child process, or what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:
            os.write(writer, str(error).encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(child, 0)
    return None if status == 0 else text or f"the attempt ended with status {status}"


def _ptrace():
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        if libc.ptrace(16, child, None, None) != 0:  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.waitpid(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def _shared_memfd():
    """A child that opens its parent's memfd through /proc must see the parent's bytes."""
    fd = os.memfd_create("lockstep-proof")
    os.ftruncate(fd, 4096)
    memory = mmap.mmap(fd, 4096)
    path, reader_writer = f"/proc/{os.getpid()}/fd/{fd}", os.pipe()
    child = os.fork()
    if child == 0:
        other = os.open(path, os.O_RDWR)
        mmap.mmap(other, 4096)[:4] = b"seen"
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for end in reader_writer:
        os.close(end)
    if status != 0 or memory[:4] != b"seen":
        raise OSError("a memfd of one process is not shared with another")


def _namespaces():
    done = subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip())


def _cuda_ipc(python):
    text = """
import ctypes, torch
memory = torch.zeros(1024, device="cuda")
handle = (ctypes.c_char * 64)()
code = ctypes.CDLL(None).cudaIpcGetMemHandle(handle, ctypes.c_void_p(memory.data_ptr()))
raise SystemExit(0 if code == 0 else f"cudaIpcGetMemHandle returned {code}")
"""
    done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError((done.stderr.strip().splitlines() or ["unknown"])[-1])


def _compute_sanitizer(python):
    tool = find_tool("compute-sanitizer")
    if not tool:
        raise OSError("compute-sanitizer is not installed")
    words = [tool, "--error-exitcode", "9", python, "-c", "import torch; torch.ones(4, device='cuda').sum().item()"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise OSError("compute-sanitizer takes more than 60 s for one small kernel") from None
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if code != 0:
        raise OSError("compute-sanitizer fails on one small kernel: " + (lines or ["?"])[-1])


def find_tool(name):
    """Returns the path of a tool of the CUDA toolkit, or None."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer")


def lacks(python, device, head, earlier):
    """Returns, for each thing that this machine lacks, the reason. `earlier`: results of a call that may have run on
    this very machine, since it was started; then the answer is there, and seconds of a GPU are saved."""
    if earlier and earlier.exists():
        heads = [row for row in read_rows(earlier) if row["what"] == "head"]
        if heads and heads[-1].get("boot") == head["boot"] and heads[-1].get("device") == device:
            return heads[-1]["lacks"]
    attempts = {"ptrace": _ptrace, "shared memfd": _shared_memfd, "namespaces": _namespaces}
    if device == "cuda":
        attempts["CUDA IPC"] = lambda: _cuda_ipc(python)
        attempts["compute-sanitizer"] = lambda: _compute_sanitizer(python)
    found = {name: _try_in_child(attempt) for name, attempt in attempts.items()}
    if device != "cuda":
        found["CUDA IPC"] = found["compute-sanitizer"] = "there is no GPU"
    for tool in ("eu-stack", "cuda-gdb"):
        found[tool] = None if find_tool(tool) else "not installed"
    return {name: why for name, why in found.items() if why is not None}


if __name__ == "__main__":
    found = describe(sys.executable, "cpu", True)
    print(json.dumps([found, lacks(sys.executable, "cpu", found, None)], indent=1))
