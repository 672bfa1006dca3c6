"""SLURM on one machine: a controller and nodes n1, n2, ..., all processes of this host, in a sandbox.

A script first calls host_cluster.enter_sandbox(slurm_cluster.TOOLS) and then creates a SlurmCluster. Its daemons end
with close(), or with the sandbox.
"""

import os
import pathlib
import secrets
import shutil
import subprocess

import host_cluster
from checks import wait_until

TOOLS = ("ip", "munged", "munge", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONTROLLER_PORT = 16817  # in the sandbox's own network
NODE_PORT = 17000


class SlurmCluster:
    """`num_nodes` nodes with two cores each, in one partition p. A requeued job restarts within seconds."""

    def __init__(self, folder, num_nodes=2):
        self.folder = pathlib.Path(folder)
        self.folder.chmod(0o755)  # required by munged, also for the parent directories
        self.started = []
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self.make_network(num_nodes)
        for name in ("munge", "state", "log"):
            (self.folder / name).mkdir()
        key = self.folder / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self.write_configuration(nodes)
        socket = self.folder / "munge/sock"
        self.start(
            "munged",
            "-F",
            f"--key-file={key}",
            f"--socket={socket}",
            f"--seed-file={self.folder}/munge/seed",
            f"--pid-file={self.folder}/munge/pid",
            f"--log-file={self.folder}/log/munged.log",
        )
        wait_until(
            lambda: subprocess.run(["munge", "-S", socket, "-n"], capture_output=True, check=False).returncode == 0,
            "munged does not answer",
        )
        self.start("slurmctld", "-D")
        for node in nodes:
            self.start("slurmd", "-D", "-N", node)
        wait_until(
            lambda: self.run_client("sinfo", "-h", "-t", "idle", "-o", "%D") == str(num_nodes), "the nodes are not idle"
        )

    def make_network(self, num_nodes):
        """Sets a host name and adds an interface besides lo, without which names are not resolved."""
        host_cluster.sh("hostname", "ctl")
        nodes = " ".join(f"n{number}" for number in range(1, num_nodes + 1))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost ctl\n10.77.0.254 {nodes}\n", encoding="ascii")
        host_cluster.sh("mount", "--bind", self.folder / "hosts", "/etc/hosts")
        if not os.path.exists("/proc/sys/net/ipv4/conf/eth0"):
            host_cluster.sh("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0peer")
            host_cluster.sh("ip", "addr", "add", "10.77.0.254/24", "dev", "eth0")
            host_cluster.sh("ip", "link", "set", "eth0", "up")
            host_cluster.sh("ip", "link", "set", "eth0peer", "up")

    def write_configuration(self, nodes):
        settings = {
            "ClusterName": "t",
            "SlurmctldHost": "ctl(127.0.0.1)",
            "SlurmctldPort": CONTROLLER_PORT,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.folder}/munge/sock,cred_expire=5",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{self.folder}/state",
            "SlurmdSpoolDir": f"{self.folder}/spool.%n",
            "TmpFS": f"{self.folder}/tmp.%n",
            "SlurmctldPidFile": f"{self.folder}/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SwitchType": "switch/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "MpiDefault": "none",
            "LaunchParameters": "use_interactive_step",
            "ReturnToService": 2,
            "KillWait": 5,
            "SchedulerParameters": "sched_interval=2,bf_interval=2",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for number, node in enumerate(nodes, start=1):
            for kind in ("spool", "tmp"):
                (self.folder / f"{kind}.{node}").mkdir()
            lines.append(
                f"NodeName={node} NodeHostname=ctl NodeAddr=127.0.0.1 Port={NODE_PORT + number} CPUs=2 RealMemory=1000"
            )
        lines.append("PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def start(self, program, *words):
        with open(self.folder / f"log/{program}.{len(self.started)}.out", "wb") as log:
            self.started.append(
                subprocess.Popen(
                    [shutil.which(program), *map(str, words)],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def run_client(self, *words):
        """Runs a SLURM client and returns its output, or "" if it fails."""
        done = subprocess.run(
            list(words), env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def state(self, job):
        """Returns the output of `scontrol show job` as a dictionary."""
        words = self.run_client("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def close(self):
        """Ends the daemons in the reverse order of their start."""
        for process in reversed(self.started):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
        self.started = []
