#!/usr/bin/env python3
"""Opens thousands of unauthenticated connections to the listeners of a training, which must not be affected.

Usage: unauthenticated_connections.py --lockstep PATH --program PATH_OF_TRAIN_PROBE [--connections N]
           [--transport NAME] [--seed N] [--also-gloo] [--more-kib N]
The connections send nothing, single bytes, random bytes or parts of a handshake. One rank joins late, during the
attack. The same training runs undisturbed before and after it, for its time and its hashes. The script checks that
  - each listener is bound to one address;
  - the job succeeds with the hashes of an undisturbed one, and the late rank joins;
  - the process that serves the store grows by at most 1 MiB (--more-kib).
The listeners of Gloo are attacked only with --also-gloo.
"""

import argparse
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import history  # noqa: E402
from tagged_processes import find_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_UNAUTHENTICATED"
RANKS, STEPS = 3, 300
LATE_S = 3
MAX_OPEN = 300


def listeners(pids):
    """Returns [(pid, address, port)] of the TCP sockets on which these processes listen."""
    inodes = {}
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith("socket:["):
                    inodes[link[8:-1]] = pid
        except OSError:
            pass
    found = []
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                host, port = words[1].split(":")
                raw = b"".join(struct.pack("<I", int(host[i : i + 8], 16)) for i in range(0, 2 * size, 8))
                found.append(
                    (
                        inodes[words[9]],
                        socket.inet_ntop(socket.AF_INET if size == 4 else socket.AF_INET6, raw),
                        int(port, 16),
                    )
                )
    return found


def resident_kib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def cpu_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


HELLO = b"LOCKSTEP" + struct.pack("<HB", 2, 32) + b"0" * 32 + struct.pack("<ii", 0, 1) + bytes(32)


def unauthenticated_bytes(rng):
    kind = rng.randrange(6)
    if kind == 0:
        return b""  # a port scan, or a silent connection
    if kind == 1:
        return rng.randbytes(rng.randrange(1, 400))
    if kind == 2:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * rng.randrange(1, 20)
    if kind == 3:
        return HELLO[: rng.randrange(1, len(HELLO))]
    if kind == 4:
        return HELLO + rng.randbytes(32)  # of another job, or with a wrong proof of the key
    return struct.pack("<QQ", 1 << 62, 1 << 62) * 4


def attack(ports, count, rng, end):
    """Opens `count` connections until `end`. Some stay open, and some of these send a byte now and then."""
    silent, slow = [], []
    begin = time.monotonic()
    for number in range(count):
        due = begin + (end - begin) * number / count
        while time.monotonic() < due:
            for one in slow[-20:]:
                try:
                    one.send(b"L")
                except OSError:
                    pass
            time.sleep(0.002)
        one = socket.socket()
        one.settimeout(0.2)
        try:
            one.connect(("127.0.0.1", rng.choice(ports)))
            one.setblocking(False)
            one.send(unauthenticated_bytes(rng) or b"L"[: rng.randrange(2)])
        except OSError:
            pass
        if rng.random() < 0.1:
            (slow if rng.random() < 0.5 else silent).append(one)
        else:
            one.close()
        for open_ones in (silent, slow):
            while len(open_ones) > MAX_OPEN // 2:
                open_ones.pop(0).close()
    for one in silent + slow:
        one.close()


class Training:
    """A running job whose rank 2 joins LATE_S seconds late."""

    def __init__(self, args, folder, rng):
        self.folder = pathlib.Path(folder)
        self.mark = f"{os.getpid()}.{rng.randrange(1 << 48)}"
        words = f'[ "$LOCKSTEP_RANK" = 2 ] && sleep {LATE_S}; exec "$@"'
        self.job = subprocess.Popen(
            [
                args.lockstep,
                "run",
                "-n",
                str(RANKS),
                "--bind",
                "none",
                "--transport",
                args.transport,
                "--",
                "sh",
                "-c",
                words,
                "sh",
                args.program,
                "chaos",
                folder,
                str(STEPS),
            ],
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self):
        return list(find_tagged(MARK, self.mark))

    def histories(self):
        return [history.read(self.folder, rank) for rank in range(RANKS)]

    def end(self):
        """Blocks until the job ends. Returns (errors, seconds of the steps after the first 20)."""
        try:
            _, err = self.job.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            return ["it did not end"], 0
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.job.wait()
        lines = history.steps(self.histories()[0])
        wrong = [f"exit code {self.job.returncode}: {err[-500:]}"] if self.job.returncode != 0 else []
        return wrong, (lines[-1]["ns"] - lines[20]["ns"]) / 1e9 if len(lines) == STEPS else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--connections", type=int, default=10000)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--also-gloo", action="store_true")
    parser.add_argument("--more-kib", type=int, default=1024, help="by how much the launcher may grow")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.connections} connections, transport {args.transport}", flush=True)
    rng = random.Random(args.seed)
    wrong, times, hashes = [], {}, None
    for part in ("before", "attacked", "after"):
        with tempfile.TemporaryDirectory() as folder:
            training = Training(args, folder, rng)
            if part == "attacked":
                wrong += attack_training(args, training, rng)
            bad, times[part] = training.end()
            wrong += [f"{part}: {text}" for text in bad]
            all_histories = training.histories()
            wrong += history.check_hashes(all_histories, hashes) + history.check_samples(all_histories, True)
            hashes = hashes or {line["step"]: line["hash"] for line in history.steps(all_histories[0])}
    ratio = times["attacked"] / max(1e-9, (times["before"] + times["after"]) / 2)
    print(
        "; ".join(f"{part} {seconds:.3f} s" for part, seconds in times.items())
        + f" for {STEPS - 20} steps: {ratio:.3f} of undisturbed"
    )
    if wrong:
        sys.exit("; ".join(wrong))


def attack_training(args, training, rng):
    """Attacks a training while it waits for its late rank, and while it trains. Returns errors."""
    time.sleep(1)  # the other ranks run, and wait for the late one
    launcher = training.job.pid
    found = listeners(training.processes())
    wrong = [f"process {pid} listens on {address}:{port}" for pid, address, port in found if address != "127.0.0.1"]
    ports = [port for pid, _, port in found if pid == launcher]
    if not ports:
        return ["the launcher does not listen"]
    attack(ports, 200, rng, time.monotonic() + 0.2)  # memory that the first connections allocate is kept
    before, cpu_before = resident_kib(launcher), cpu_s(launcher)
    begin = time.monotonic()
    attack(ports, args.connections // 2, rng, begin + LATE_S)
    # The ranks train now, and may have listeners of Gloo.
    found = listeners(training.processes())
    wrong += [f"process {pid} listens on {address}:{port}" for pid, address, port in found if address != "127.0.0.1"]
    if args.also_gloo:
        ports = [port for _, _, port in found]
    attack(ports, args.connections - args.connections // 2, rng, time.monotonic() + 2)
    more = resident_kib(launcher) - before
    print(
        f"the launcher grew by {more} KiB and used {cpu_s(launcher) - cpu_before:.2f} s of processor time; "
        f"{len(found)} listeners",
        flush=True,
    )
    if more > args.more_kib:
        wrong.append(f"the launcher grew by {more} KiB; expected at most {args.more_kib}")
    return wrong


main()
