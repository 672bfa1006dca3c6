"""Hosts of a host_cluster.HostCluster that one can log in to: each with processes, a name, a /dev/shm and an sshd of its own. The files and the clock they share."""

import os
import shutil
import subprocess
import time

import host_cluster
from host_cluster import SUBNET, sh

INIT = """hostname h$1; mount -t sysfs sysfs /sys; mount -t tmpfs -o size=256m tmpfs /dev/shm
/usr/sbin/sshd -f "$2/ssh/sshd$1" -E "$2/log/sshd.h$1"
touch "$2/up.h$1"; while :; do sleep 1000 & wait $!; done"""
TOOLS = ("ip", "ssh", "ssh-keygen")


class SshCluster(host_cluster.HostCluster):
    """Needs enter_sandbox(TOOLS). Whoever is in the cell logs in to h1, h2, ... as root, with a key and known hosts that belong to the bed."""

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
        self.inits = {}
        for host in range(1, num_hosts + 1):
            self.boot(host)
        for host in range(1, num_hosts + 1):
            self.wait_up(host)

    def configure_ssh(self, more=""):
        with open(f"{self.folder}/ssh/config", "w", encoding="ascii") as config:
            config.write(
                f"Host h* {SUBNET}*\nIdentityFile {self.folder}/ssh/user\nUserKnownHostsFile {self.folder}/ssh/known\nStrictHostKeyChecking yes\n{more}"
            )

    def boot(self, host):
        with open(f"{self.folder}/ssh/sshd{host}", "w", encoding="ascii") as config:
            config.write(
                f"HostKey {self.folder}/ssh/host{host}\nAuthorizedKeysFile {self.folder}/ssh/user.pub\nStrictModes no\nUsePAM no\nPidFile none\nMaxStartups 100\n"
                "SetEnv RANK=77 LOCAL_RANK=77 CUDA_VISIBLE_DEVICES=70,71,72,73\n"
            )  # a login whose variables are not for ranks
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
        """The host is gone without a word."""
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
        until(lambda: os.path.exists(f"{self.folder}/up.h{host}"), f"h{host} does not come up")

    def first_pid(self, host):
        """Of the host's first process, as it is seen from outside."""
        with open(f"/proc/{self.inits[host].pid}/task/{self.inits[host].pid}/children", encoding="ascii") as children:
            return int(children.read().split()[0])

    def inside(self, host, words):
        """The words of a command that runs on `host` without ssh."""
        return ["nsenter", "-t", str(self.first_pid(host)), "-n", "-u", "-m", "-p", "-i", *map(str, words)]

    def run_on_host(self, host, *words):
        return subprocess.run(self.inside(host, words), check=True, capture_output=True, text=True).stdout

    def processes(self, host):
        """{pid: words} of what runs on `host` beside its first process, its sshd and their helpers; pids as seen from outside."""
        space = os.readlink(f"/proc/{self.first_pid(host)}/ns/pid")
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") != space:
                    continue
                with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                    words = cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue  # it has ended
            if words and not words.startswith(("sh -c hostname", "sleep 1000", "sshd:", "nsenter")):
                found[int(pid)] = words
        return found

    def connections(self, host):
        """How many logins the sshd of `host` has taken so far."""
        try:
            with open(f"{self.folder}/log/sshd.h{host}", encoding="utf-8", errors="replace") as log:
                return sum("Accepted publickey" in line for line in log)
        except FileNotFoundError:
            return 0


def until(condition, what, limit_s=10.0):
    """Waits for a condition; returns how long it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > limit_s:
            raise RuntimeError(f"{what}, for {limit_s} s")
        time.sleep(0.01)
    return time.monotonic() - begun


def has_mpirun():
    return shutil.which("mpirun") is not None
