#!/usr/bin/env python3
"""Disturbs one training on two hosts at random for a long time, and compares each of its steps with an undisturbed one.

Usage: soak.py --lockstep PATH --program PATH_OF_TRAINING_RESUMABLE [--minutes N] [--seed N] [--only FAULT,...]

Four ranks on two hosts, which are network namespaces, under one `lockstep run --max-restarts`. The faults:
  kill, segv       a signal ends a rank
  stop             SIGSTOP to a rank, for good
  kill_agent       SIGKILL to the agent of a host
  cut              a host is unreachable for 9 s
  late_kill        SIGKILL to a rank while it starts after a restart
  pause, pause_agent, short_cut, slow_disk
                   a rank, an agent, the network, or the file system of the checkpoints pauses for at most 3.5 s
The launcher must name the cause of each restart, and must not restart after the others, which are the last four. At the
end the job receives SIGTERM, saves, and is started once more. It must
  - have, after each step of each start, the weights of an undisturbed training after this step, bit by bit;
  - lose at most the steps since the last two saves, and draw each sample of an epoch once (resume_history.py);
  - leave no process, no shared memory and no temporary file on any host;
  - not have grown: the memory and the descriptors of the launcher, and the memory of the agents.
The exit code is 77 if the machine lacks what the script requires. Without loop devices, slow_disk is left out.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "training")]
import host_cluster  # noqa: E402
import resume_history  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, wait_until  # noqa: E402

HOSTS = (1, 2)
RANKS = 4
SAMPLES, BATCH = 1200, 12
STEPS_PER_EPOCH = SAMPLES // BATCH
SLOW_MS = 100  # per step of the disturbed training
SAVE_EVERY = 10
RECOVERY_S = 90
GROWTH_BYTES = 1 << 20
TAIL_LENGTH = 20  # lines of stderr in the text of an error

# `cause` matches the announcement of the restart; None if the job must continue without one.
Fault = collections.namedtuple("Fault", "weight cause")
FAULTS = {
    "kill": Fault(5, r"RANK_DIED of rank \d .*killed by SIGKILL"),
    "segv": Fault(3, r"RANK_DIED of rank \d .*killed by SIGSEGV"),
    "stop": Fault(1, r"RANK_STALLED of rank \d"),
    "kill_agent": Fault(1, r"INTERNAL on h\d: the agent, .* was killed by SIGKILL"),
    "cut": Fault(1, r"PEER_UNREACHABLE"),
    "late_kill": Fault(2, r"RANK_DIED of rank \d .*killed by SIGKILL"),
    "pause": Fault(3, None),
    "pause_agent": Fault(2, None),
    "short_cut": Fault(3, None),
    "slow_disk": Fault(4, None),
}


def memory_of(pid):
    """Returns the bytes of private memory in use by a process; 0 if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


class History:
    """Reads what the ranks append to their histories."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir()
        self.offset = 0
        self.starts, self.steps, self.newest = 0, 0, 0  # of rank 0; `steps` counts repeated ones as well

    def update(self):
        path = self.folder / "rank.0.jsonl"
        if not path.exists():
            return self
        with open(path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.offset += len(text)
        for line in text.splitlines():
            record = json.loads(line)
            self.starts += "pid" in record
            if "step" in record:
                self.steps += 1
                self.newest = record["step"]
        return self

    def hashes(self):
        """Returns (step, hash after it) of all steps of all starts and ranks."""
        for path in self.folder.glob("rank.*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # SIGKILL may cut a line
                if "step" in record:
                    yield record["step"], record["after"]


class Disk:
    """A file system that can be frozen, for the directory of the training."""

    def __init__(self, folder):
        self.path = f"{folder}/disk"
        os.mkdir(self.path)
        image = f"{folder}/disk.image"
        with open(image, "wb") as file:
            file.truncate(512 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        mounted = subprocess.run(["mount", "-o", "loop", image, self.path], capture_output=True, check=False)
        self.can_freeze = mounted.returncode == 0
        if not self.can_freeze:
            print("without slow_disk: there are no loop devices", flush=True)

    def freeze(self, seconds):
        subprocess.run(["fsfreeze", "--freeze", self.path], check=True)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", self.path], check=True)


class Training:
    """The training under `lockstep run`; `name` is that of its directory, and of its history."""

    def __init__(self, args, folder, name, slow_ms, save_every):
        self.history = History(f"{folder}/{name}.history")
        self.err_path = pathlib.Path(f"{folder}/{name}.err")
        self.out_path = pathlib.Path(f"{folder}/{name}.out")
        options = ["--max-restarts", "100000", "--restart-pause", "0.1", "--stall-timeout", "10", "--bind", "none"]
        words = ["model=mlp", f"folder={folder}/disk", f"name={name}", f"history={self.history.folder}", "resume=auto"]
        words += [f"epochs={args.epochs}", f"samples={SAMPLES}", f"batch={BATCH}", f"slow_ms={slow_ms}"]
        self.command = [args.lockstep, "run", "-H", ",".join(f"h{host}:{RANKS // 2}" for host in HOSTS), *options]
        self.command += ["--", args.program, *words, f"save_every={save_every}"]
        self.start()

    def start(self):
        with open(self.err_path, "ab") as err, open(self.out_path, "ab") as out:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=os.path.dirname(self.err_path)
            )

    def restarts(self):
        return [line for line in self.err_path.read_text(encoding="utf-8").splitlines() if "; restart " in line]

    def wait_for_steps(self, count, limit_s):
        """Blocks until rank 0 has made `count` further steps."""
        goal = self.history.update().steps + count

        def reached():
            if self.process.poll() is not None:
                check(False, f"the job ended with {self.process.returncode}: {self.tail()}")
            return self.history.update().steps >= goal

        wait_until(reached, f"no progress: {self.tail()}", limit_s)

    def stop(self):
        """Sends SIGTERM, and checks that the ranks stop after a step."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        check(code == 75 and "PREEMPTED" in self.tail(), f"SIGTERM: code {code}: {self.tail()}")

    def tail(self):
        return "\n".join(self.err_path.read_text(encoding="utf-8").splitlines()[-TAIL_LENGTH:])


class Soak:
    def __init__(self, args, cluster, folder, rng):
        self.args, self.cluster, self.rng, self.folder = args, cluster, rng, folder
        self.disk = Disk(folder)
        os.environ["TMPDIR"] = f"{folder}/tmp"
        os.mkdir(os.environ["TMPDIR"])
        self.counts = collections.Counter()
        self.memory = collections.defaultdict(list)  # of "launcher", "agents", "launcher's descriptors"

    def pids(self, host, text):
        return sorted(pid for pid, words in self.cluster.processes(host).items() if text in words)

    def rank(self):
        """Returns the pid of a random rank, or None if there is none at the moment."""
        program = os.path.basename(self.args.program)
        ranks = [
            pid
            for host in HOSTS
            for pid, words in self.cluster.processes(host).items()
            if os.path.basename(words.split(" ")[0]) == program
        ]
        return self.rng.choice(ranks) if ranks else None

    def signal_rank(self, number):
        wait_until(lambda: self.rank() is not None, "no rank", RECOVERY_S)
        os.kill(self.rank(), number)

    def agent(self):
        """Returns the pid of a random agent; the first of a host's two processes watches the second."""
        return self.pids(self.rng.choice(HOSTS), "lockstep agent")[1]

    def pause(self, pid, seconds):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def cut(self, seconds):
        host = self.rng.choice(HOSTS)
        self.cluster.cut(host)
        time.sleep(seconds)
        self.cluster.heal(host)

    def disturb(self, fault):
        seconds = self.rng.uniform(0.2, 3.5)
        if fault in ("kill", "late_kill"):
            self.signal_rank(signal.SIGKILL)
        elif fault == "segv":
            self.signal_rank(signal.SIGSEGV)
        elif fault == "stop":
            self.signal_rank(signal.SIGSTOP)
        elif fault == "kill_agent":
            os.kill(self.agent(), signal.SIGKILL)
        elif fault == "cut":
            self.cut(9)
        elif fault == "pause":
            self.pause(self.rank(), seconds)
        elif fault == "pause_agent":
            self.pause(self.agent(), seconds)
        elif fault == "short_cut":
            self.cut(seconds)
        elif fault == "slow_disk":
            self.disk.freeze(seconds)

    def measure(self, launcher):
        self.memory["launcher"].append(memory_of(launcher))
        self.memory["launcher's descriptors"].append(len(os.listdir(f"/proc/{launcher}/fd")))
        agents = [pid for host in HOSTS for pid in self.pids(host, "lockstep agent")]
        self.memory["agents"].append(max(map(memory_of, agents), default=0))

    def run_fault(self, training, fault):
        """Injects a fault during the training, and checks that the job restarts for this cause, or does not."""
        known = len(training.restarts())
        starts = training.history.update().starts
        self.disturb(fault)
        self.counts[fault] += 1
        cause = FAULTS[fault].cause
        if cause is not None:
            wait_until(lambda: len(training.restarts()) > known, f"{fault}: no restart: {training.tail()}", RECOVERY_S)
            if fault == "late_kill":
                self.signal_rank(signal.SIGKILL)
            wait_until(
                lambda: training.process.poll() is not None or training.history.update().starts > starts,
                f"{fault}: the ranks do not start again: {training.tail()}",
                RECOVERY_S,
            )
        # Two saves, so that the launcher sees progress.
        training.wait_for_steps(2 * SAVE_EVERY, RECOVERY_S)
        for line in training.restarts()[known:]:
            if cause is None or not re.search(cause, line):
                check(False, f"{fault}: {line}\n{training.tail()}")

    def run(self):
        args = self.args
        names = [name for name in args.only if name != "slow_disk" or self.disk.can_freeze]
        training = Training(args, self.folder, "disturbed", SLOW_MS, SAVE_EVERY)
        training.wait_for_steps(2 * SAVE_EVERY, RECOVERY_S)
        end = time.monotonic() + 60 * args.minutes
        shown = time.monotonic()
        while time.monotonic() < end:
            name = self.rng.choices(names, [FAULTS[name].weight for name in names])[0]
            self.run_fault(training, name)
            self.measure(training.process.pid)
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print(f"step {training.history.newest}, {len(training.restarts())} restarts", flush=True)
            time.sleep(self.rng.uniform(0, 2))
        training.stop()
        self.check_remains("the stop")
        training.start()
        training.wait_for_steps(2 * SAVE_EVERY, RECOVERY_S)
        training.stop()
        self.check_remains("the second start")
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        check(True, f"{sum(self.counts.values())} faults ({faults}), {len(training.restarts())} restarts")
        self.check_memory()
        self.check_history(training)

    def check_remains(self, when):
        for host in HOSTS:
            wait_until(lambda host=host: not self.cluster.processes(host), f"processes are left on h{host}", 10)
            shared = self.cluster.run_on_host(host, "ls", "/dev/shm").split()
            check(not shared, f"shared memory on h{host} after {when}: {shared}")
        left = os.listdir(os.environ["TMPDIR"])
        check(not left, f"temporary files after {when}: {left}")

    def check_memory(self):
        """Compares the first and the last sixth of the time: the largest values, but of descriptors, of which a restart
        needs some for a moment, the smallest at the end."""
        for name, values in self.memory.items():
            part = max(1, len(values) // 6)
            has_peaks = "descriptors" in name
            first, last = max(values[:part]), (min if has_peaks else max)(values[-part:])
            limit = first if has_peaks else first + GROWTH_BYTES
            check(last <= limit, f"{name}: at most {first} at the beginning, {last} at the end, {max(values)} in all")

    def check_history(self, training):
        last = training.history.update().newest
        reference = Training(self.args, self.folder, "undisturbed", 0, 1000)
        wait_until(
            lambda: reference.process.poll() is not None or reference.history.update().newest >= last,
            f"the undisturbed training is slow: {reference.tail()}",
            1800,
        )
        check(reference.process.poll() is None, f"the undisturbed training reached step {last} {reference.tail()}")
        reference.stop()
        expected = dict(reference.history.hashes())
        steps = different = 0
        for step, after in training.history.hashes():
            steps += 1
            different += after != expected[step]
        check(steps > 0 and different == 0, f"{different} of {steps} hashes of {last} steps differ")
        wrong = resume_history.check(str(training.history.folder), SAMPLES, 2 * SAVE_EVERY, last // STEPS_PER_EPOCH)
        check(not wrong, f"the history has {len(wrong)} errors {wrong}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--program", required=True, type=os.path.abspath)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FAULTS))
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    if not os.environ.get(host_cluster.IN_SANDBOX):
        sys.argv += ["--seed", str(seed)]  # the script restarts in a sandbox
        print(f"seed {seed}", flush=True)
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    os.environ["OMP_NUM_THREADS"] = "1"
    args.epochs = int(args.minutes * 60_000 / SLOW_MS / STEPS_PER_EPOCH) + 10
    with tempfile.TemporaryDirectory() as folder:
        try:
            Soak(args, ssh_cluster.SshCluster(len(HOSTS), folder), folder, random.Random(seed)).run()
        finally:
            subprocess.run(["umount", "--lazy", f"{folder}/disk"], stderr=subprocess.DEVNULL, check=False)


main()
