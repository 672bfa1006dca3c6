"""Passes Ethernet frames between two tap devices, each after a delay, and drops some. A kernel without netem has
nothing else. Usage: delay_relay.py TAP TAP SECONDS LOSS (from 0 to 1)."""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MOST_FRAMES = 64  # that are read from a device before the other has its turn


def open_tap(name):
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def read_frames(tap):
    for _ in range(MOST_FRAMES):
        try:
            yield os.read(tap, 65536)
        except BlockingIOError:
            return


def write(tap, frame):
    try:
        os.write(tap, frame)
    except OSError:  # the device is down, or its queue is full: the frame is lost
        pass


def main():
    taps = [open_tap(name) for name in sys.argv[1:3]]
    delay, loss = float(sys.argv[3]), float(sys.argv[4])
    random.seed(1)
    queues = [collections.deque(), collections.deque()]  # of frames from each device, with the time when they are due
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        for queue, other in zip(queues, reversed(taps), strict=True):
            while queue and queue[0][0] <= now:
                write(other, queue.popleft()[1])
        due = min((queue[0][0] for queue in queues if queue), default=now + 1)
        ready, _, _ = select.select(taps, [], [], max(0, due - time.monotonic()))
        for tap in ready:
            queue = queues[taps.index(tap)]
            for frame in read_frames(tap):
                if random.random() >= loss:
                    queue.append((time.monotonic() + delay, frame))


main()
