"""Several "hosts" on one machine: network namespaces behind a switch, with links whose rate can be limited.

Everything runs in a sandbox of its own mount, network, PID, UTS and IPC namespaces. The kernel removes the sandbox with
all its processes when its first process, the script itself, ends for any reason. A script first calls enter_sandbox()
and then creates a HostCluster. It requires root, unshare, nsenter, ip and, for shaping, tc.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

SKIPPED = 77  # exit code: ctest counts it as a skip
SUBNET = "10.77.0."
IN_SANDBOX = "LOCKSTEP_TEST_SANDBOX"


def sh(*words):
    subprocess.run([str(word) for word in words], check=True)


def skip(why):
    print(f"SKIPPED: {why}", flush=True)
    sys.exit(SKIPPED)


def enter_sandbox(tools=("ip",)):
    """Restarts the script in a new sandbox and returns inside it. Exits as skipped if there can be no sandbox."""
    if os.environ.pop(IN_SANDBOX, "") == "":
        if os.geteuid() != 0:
            skip("network namespaces need root")
        for tool in ("unshare", "nsenter", *tools):
            if not shutil.which(tool):
                skip(f"{tool} is not installed (Debian: iproute2, util-linux)")
        sandbox = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        if subprocess.run([*sandbox, "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            skip("this kernel or container does not permit namespaces")
        os.environ[IN_SANDBOX] = "1"
        os.execvp(sandbox[0], [*sandbox, sys.executable, *sys.argv])
    # The first process of a PID namespace ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "tmpfs", "tmpfs", "/run")
    os.mkdir("/run/netns")
    sh("ip", "link", "set", "lo", "up")


class HostCluster:
    """Hosts 1 .. num_hosts at 10.77.0.1 .., with this process at 10.77.0.254."""

    def __init__(self, num_hosts, folder, congestion="cubic"):
        self.folder = folder
        self.num_hosts = num_hosts
        self.congestion = congestion
        sh("hostname", "ctl")
        with open(f"{folder}/hosts", "w", encoding="ascii") as names:
            names.write("127.0.0.1 localhost\n10.77.0.254 ctl\n")
            for host in range(1, num_hosts + 1):
                names.write(f"{SUBNET}{host} h{host}\n")
        sh("mount", "--bind", f"{folder}/hosts", "/etc/hosts")
        sh("ip", "netns", "add", "sw")
        sh("ip", "-n", "sw", "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", "sw", "link", "set", "br0", "up")
        sh("ip", "-n", "sw", "link", "add", "cut0", "type", "bridge")
        sh("ip", "-n", "sw", "link", "set", "cut0", "up")
        sh("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "vctl", "netns", "sw")
        sh("ip", "-n", "sw", "link", "set", "vctl", "master", "br0", "up")
        sh("ip", "addr", "add", f"{SUBNET}254/24", "dev", "eth0")
        sh("ip", "link", "set", "eth0", "up")
        for host in range(1, num_hosts + 1):
            self.connect(host)

    def connect(self, host):
        """Creates the namespace of `host` and links it to the switch. Its TCP has the algorithm that Linux has by
        default, whatever this machine has: BBR overruns the short queues of the links, and is slower there."""
        name = f"h{host}"
        sh("ip", "netns", "add", name)
        sh(
            "ip",
            "-n",
            "sw",
            "link",
            "add",
            f"v{name}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            f"02:77:00:00:00:{host:02x}",
            "netns",
            name,
        )
        sh("ip", "-n", "sw", "link", "set", f"v{name}", "master", "br0", "up")
        sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", name, "addr", "add", f"{SUBNET}{host}/24", "dev", "eth0")
        sh("ip", "-n", name, "link", "set", "eth0", "up")
        sh("ip", "-n", name, "route", "replace", f"{SUBNET}0/24", "dev", "eth0", "congctl", self.congestion)

    def introduce(self):
        """Adds permanent ARP entries between all hosts. Large clusters need them: the kernel keeps at most a thousand
        resolved entries for all namespaces together."""
        numbers = range(1, self.num_hosts + 1)
        for host in numbers:
            others = "".join(
                f"neigh replace {SUBNET}{other} lladdr 02:77:00:00:00:{other:02x} dev eth0 nud permanent\n"
                for other in numbers
                if other != host
            )
            subprocess.run(["ip", "-n", f"h{host}", "-batch", "-"], input=others, text=True, check=True)

    def shape(self, rate, hosts=None, burst="256kb"):
        """Limits the rate at which each host sends and receives; after a pause, `burst` passes at once."""
        for namespace, device in self.link_ends(hosts):
            sh(
                "tc",
                "-n",
                namespace,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                burst,
                "latency",
                "20ms",
            )

    def unshape(self, hosts=None):
        for namespace, device in self.link_ends(hosts):
            sh("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def link_ends(self, hosts):
        """Returns the two ends of the link of each host; of all hosts if `hosts` is None."""
        return [
            end for host in hosts or range(1, self.num_hosts + 1) for end in ((f"h{host}", "eth0"), ("sw", f"vh{host}"))
        ]

    @staticmethod
    def delay(host, seconds, loss):
        """Delays all frames from and to `host`, and drops a share `loss` of them. Once, for one host."""
        sh("ip", "-n", "sw", "link", "add", "far0", "type", "bridge")
        sh("ip", "-n", "sw", "link", "set", "far0", "up")
        sh("ip", "-n", "sw", "link", "set", f"vh{host}", "master", "far0")
        for tap, bridge in (("near1", "br0"), ("near2", "far0")):
            sh("ip", "-n", "sw", "tuntap", "add", "dev", tap, "mode", "tap")
            sh("ip", "-n", "sw", "link", "set", tap, "master", bridge, "up")
        relay = os.path.join(os.path.dirname(os.path.abspath(__file__)), "delay_relay.py")
        words = ["nsenter", "--net=/run/netns/sw", sys.executable, relay, "near1", "near2", str(seconds), str(loss)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # ends with the sandbox
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("delay_relay.py did not start")

    @staticmethod
    def cut(host):
        """Drops all packets from and to `host`, without resetting connections and without loss of carrier."""
        sh("ip", "-n", "sw", "link", "set", f"vh{host}", "master", "cut0")

    @staticmethod
    def heal(host):
        sh("ip", "-n", "sw", "link", "set", f"vh{host}", "master", "br0")

    @staticmethod
    def cut_one_way(sender, receiver):
        """Drops all packets from `sender` to `receiver`, but not those in the other direction."""
        sh(
            "ip",
            "-n",
            f"h{sender}",
            "neigh",
            "replace",
            f"{SUBNET}{receiver}",
            "lladdr",
            "02:00:00:00:00:99",
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    @staticmethod
    def heal_one_way(sender, receiver):
        sh("ip", "-n", f"h{sender}", "neigh", "del", f"{SUBNET}{receiver}", "dev", "eth0")

    @staticmethod
    def command_on_host(host, words):
        """Returns the argv that runs `words` on `host`, under the name of the host."""
        enter = ["nsenter", f"--net=/run/netns/h{host}", "unshare", "--uts", "sh", "-c"]
        return [*enter, f'hostname h{host}; exec "$@"', "sh", *[str(word) for word in words]]

    def start(self, host, words, **options):
        return subprocess.Popen(self.command_on_host(host, words), **options)

    def bytes_of(self, host):
        """Returns the bytes (sent, received) by `host` since its creation, counted at the switch."""
        links = json.loads(
            subprocess.run(
                ["ip", "-n", "sw", "-s", "-j", "link", "show", f"vh{host}"], check=True, capture_output=True
            ).stdout
        )
        return links[0]["stats64"]["rx"]["bytes"], links[0]["stats64"]["tx"]["bytes"]

    def remote_shell(self):
        """Writes a script with which mpirun starts its daemons instead of ssh, and returns its path."""
        path = f"{self.folder}/remote_shell"
        with open(path, "w", encoding="ascii") as script:
            script.write(
                "#!/bin/sh\nhost=$1\nshift\n"
                'exec nsenter --net=/run/netns/$host unshare --uts sh -c "hostname $host; $*"\n'
            )
        os.chmod(path, 0o755)
        return path
