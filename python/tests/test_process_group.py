"""Programs that call init_process_group() as well as lockstep.init(), without a launcher of Lockstep."""

import os
import socket
import subprocess
import sys
import textwrap


def run(size, program, **variables):
    """Returns the exit codes and outputs of `size` processes with the variables of env://."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**env, "RANK": str(rank), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs


def test_error_is_printed():
    """torch's hook for exceptions holds back what ours prints."""
    program = """
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("lockstep")
        world = lockstep.init()
        world.all_reduce(torch.ones(3), name="a" * (world.rank + 1))
    """
    codes, outputs = run(2, program)
    assert codes == [70, 70] and all("DesyncError: " in said for said in outputs), (codes, outputs)
