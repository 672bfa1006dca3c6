"""A host_cluster.HostCluster whose hosts accept logins: each has processes, a name, a /dev/shm and an sshd of its own.

All hosts share the file system and the clock.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import time

import host_cluster
from checks import check, wait_until
from host_cluster import SUBNET, sh

INIT = """hostname h$1; mount -t sysfs sysfs /sys; mount -t tmpfs -o size=256m tmpfs /dev/shm
/usr/sbin/sshd -f "$2/ssh/sshd$1" -E "$2/log/sshd.h$1"
touch "$2/up.h$1"; while :; do sleep 1000 & wait $!; done"""
TOOLS = ("ip", "ssh", "ssh-keygen")
RUN_LIMIT_S = 240


class SshCluster(host_cluster.HostCluster):
    """Requires enter_sandbox(TOOLS). Processes in the sandbox can log in to h1, h2, ... as root, with a key and known
    hosts that belong to the cluster."""

    def __init__(self, num_hosts, folder):
        if not os.path.exists("/usr/sbin/sshd"):
            host_cluster.skip("sshd is not installed (Debian: openssh-server)")
        super().__init__(num_hosts, folder)
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("ssh", "log"):
            os.mkdir(f"{folder}/{name}")
        os.chmod(folder, 0o755)
        for name in ("user", *(f"host{host}" for host in range(1, num_hosts + 1))):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/ssh/{name}")
        with open(f"{folder}/ssh/known", "w", encoding="ascii") as known:
            for host in range(1, num_hosts + 1):
                with open(f"{folder}/ssh/host{host}.pub", encoding="ascii") as key:
                    known.write(f"h{host},{SUBNET}{host} {' '.join(key.read().split()[:2])}\n")
        self.configure_ssh()
        sh("mount", "--bind", f"{folder}/ssh/config", "/etc/ssh/ssh_config")
        # What this machine's root runs at each login is no part of the hosts. Some tools wait there for a lock in the
        # home directory, which all hosts share.
        login_file = f"{pwd.getpwuid(0).pw_dir}/.bashrc"
        if os.path.exists(login_file):
            sh("mount", "--bind", "/dev/null", login_file)
        self.inits = {}
        for host in range(1, num_hosts + 1):
            self.boot(host)
        for host in range(1, num_hosts + 1):
            self.wait_up(host)

    def configure_ssh(self, more=""):
        with open(f"{self.folder}/ssh/config", "w", encoding="ascii") as config:
            config.write(
                f"Host h* {SUBNET}*\nIdentityFile {self.folder}/ssh/user\n"
                f"UserKnownHostsFile {self.folder}/ssh/known\nStrictHostKeyChecking yes\n{more}"
            )

    def boot(self, host):
        with open(f"{self.folder}/ssh/sshd{host}", "w", encoding="ascii") as config:
            config.write(
                f"HostKey {self.folder}/ssh/host{host}\nAuthorizedKeysFile {self.folder}/ssh/user.pub\n"
                "StrictModes no\nUsePAM no\nPidFile none\nMaxStartups 100\n"
                "SetEnv RANK=77 LOCAL_RANK=77 CUDA_VISIBLE_DEVICES=70,71,72,73\n"
            )  # variables of the login that must not reach the ranks
        words = [
            "nsenter",
            f"--net=/run/netns/h{host}",
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            INIT,
            "sh",
            str(host),
            self.folder,
        ]
        self.inits[host] = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)

    def power_off(self, host):
        """Removes the host without closing its connections."""
        sh("ip", "-n", "sw", "link", "del", f"vh{host}")
        self.inits[host].kill()
        self.inits[host].wait()
        os.remove(f"{self.folder}/up.h{host}")
        sh("ip", "netns", "del", f"h{host}")

    def power_on(self, host):
        self.connect(host)
        self.boot(host)
        self.wait_up(host)

    def wait_up(self, host):
        wait_until(lambda: os.path.exists(f"{self.folder}/up.h{host}"), f"h{host} does not come up")

    def first_pid(self, host):
        """Returns the pid, in the sandbox, of the host's first process."""
        with open(f"/proc/{self.inits[host].pid}/task/{self.inits[host].pid}/children", encoding="ascii") as children:
            return int(children.read().split()[0])

    def command_inside(self, host, words):
        """Returns the argv that runs `words` on `host` without ssh."""
        return ["nsenter", "-t", str(self.first_pid(host)), "-n", "-u", "-m", "-p", "-i", *map(str, words)]

    def run_on_host(self, host, *words):
        return subprocess.run(self.command_inside(host, words), check=True, capture_output=True, text=True).stdout

    def processes(self, host):
        """Returns {pid: command} of the processes on `host`, with their pids in the sandbox, without the host's first
        process, its sshd and their helpers."""
        namespace = os.readlink(f"/proc/{self.first_pid(host)}/ns/pid")
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") != namespace:
                    continue
                with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                    words = cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue  # it has ended
            if words and not words.startswith(("sh -c hostname", "sleep 1000", "sshd:", "nsenter")):
                found[int(pid)] = words
        return found

    def connections(self, host):
        """Returns the number of logins that the sshd of `host` has accepted."""
        try:
            with open(f"{self.folder}/log/sshd.h{host}", encoding="utf-8", errors="replace") as log:
                return sum("Accepted publickey" in line for line in log)
        except FileNotFoundError:
            return 0


def run_cases(cases, names, num_hosts, runs=1):
    """Runs each of the cases with these names, or all cases, `runs` times, on one new cluster."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = SshCluster(num_hosts, folder)
        for name in names or cases:
            for _ in range(runs):
                print(f"-- {name}", flush=True)
                cases[name](cluster)


class LockstepRun:
    """A `lockstep run` in the background."""

    def __init__(self, lockstep, *words, env=None, cwd=None):
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [lockstep, "run", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )

    def end(self, limit_s=RUN_LIMIT_S):
        """Blocks until it exits; raises after `limit_s`. Returns (exit code, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            print(out, err)
            raise
        self.took = time.monotonic() - self.begun
        return self.process.returncode, out, err


def expect_fatal(lockstep, *words, code, has, **options):
    """Runs `lockstep run`, which must exit with `code` and a FATAL line that contains all of `has`. Returns stderr."""
    exit_code, _, err = LockstepRun(lockstep, *words, **options).end()
    line = err.splitlines()[-1] if err else ""
    good = exit_code == code and line.startswith("FATAL") and all(text in line for text in has)
    check(good, f"code {exit_code}: {line[:300]}")
    return err


def has_mpirun():
    return shutil.which("mpirun") is not None
