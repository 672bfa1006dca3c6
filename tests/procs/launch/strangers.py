"""The TCP sockets on which processes listen, and unauthenticated connections to them."""

import os
import pathlib
import socket
import struct
import time

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


HELLO = b"LOCKSTEP" + struct.pack("<HB", 2, 32) + b"0" * 32 + struct.pack("<ii", 0, 1) + bytes(32)
MESH_HELLO = b"LOCKMESH"
# Of a store: a challenge, and why a proof is refused. Of a rank: a random number and a MAC.
MAX_STORE_ANSWER_BYTES, MAX_RANK_ANSWER_BYTES = 256, 64


def unauthenticated_bytes(rng):
    kind = rng.randrange(8)
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
    if kind == 5:
        return bytes(8 * rng.randrange(1, 5))
    if kind == 6:  # of a rank, without the key
        rank, purpose = rng.randrange(4), rng.randrange(4)
        return MESH_HELLO + struct.pack("<IB", rank, purpose) + rng.randbytes(rng.choice((0, 32, 64)))
    return struct.pack("<QQ", 1 << 62, 1 << 62) * 4


class Attack:
    """Connections of a process without the job's key."""

    def __init__(self, rng):
        self.rng, self.answered, self.opened = rng, [], 0
        self.kept = []  # (socket, what it has sent, whether it sends more now and then)

    def run(self, find_ports, count, end):
        """Opens `count` connections until `end`, to the ports that there are at the time. Some stay open."""
        begin = time.monotonic()
        ports, looked = [], 0
        for number in range(count):
            due = begin + (end - begin) * number / count
            while time.monotonic() < due:
                for one, _, is_slow in self.kept[-20:]:
                    if is_slow:
                        try:
                            one.send(b"L")
                        except OSError:
                            pass
                time.sleep(0.002)
            if not ports or time.monotonic() > looked + 0.02:
                ports, looked = find_ports() or ports, time.monotonic()
            if ports:
                self.open(self.rng.choice(ports))

    def open(self, port):
        one = socket.socket()
        one.settimeout(0.2)
        sent = unauthenticated_bytes(self.rng) or b"L"[: self.rng.randrange(2)]
        try:
            one.connect(("127.0.0.1", port))
            self.opened += 1
            one.setblocking(False)
            one.send(sent)
        except OSError:
            pass
        self.kept.append((one, sent, self.rng.random() < 0.1))
        while len(self.kept) > MAX_OPEN or self.rng.random() < 0.8 and len(self.kept) > MAX_OPEN // 2:
            self.close(self.kept.pop(self.rng.randrange(len(self.kept))))

    def close(self, entry):
        one, sent, _ = entry
        try:
            answer = one.recv(4096)
        except OSError:
            answer = b""
        one.close()
        if answer and not sent.startswith((HELLO[:8], MESH_HELLO)):
            self.answered.append(f"{sent[:40]} was answered by {answer[:40]}")
        if len(answer) > (MAX_RANK_ANSWER_BYTES if sent.startswith(MESH_HELLO) else MAX_STORE_ANSWER_BYTES):
            self.answered.append(f"{len(answer)} bytes were sent to a process without the key, for {sent[:40]}")

    def end(self):
        for entry in self.kept:
            self.close(entry)
        self.kept = []
