"""init() in processes that have called init_process_group(), without a launcher of Lockstep."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import os, sys, torch, torch.distributed as dist, lockstep
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def check(world):
    assert (world.rank, world.size) == (rank, size), world
    for reduce in (world.all_reduce, dist.all_reduce):
        tensor = torch.ones(3) * (rank + 1)
        reduce(tensor)
        assert tensor.eq(size * (size + 1) / 2).all(), tensor
"""
GROUPS = {
    "gloo": """
dist.init_process_group("gloo")
world = lockstep.init()
check(world)
assert lockstep.init().name == world.name
dist.destroy_process_group()
""",
    "lockstep": """
dist.init_process_group("lockstep")
check(lockstep.init())
dist.destroy_process_group()
""",
    # The ranks that mp.spawn() starts have no variables.
    "numbered_by_arguments": """
for name in ("RANK", "WORLD_SIZE"):
    del os.environ[name]
address = "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
check(lockstep.init())
dist.destroy_process_group()
""",
}
LAST = """
assert torch.equal(world.all_gather_object(rank)[-1:][0] * torch.ones(1), torch.ones(1) * (size - 1))
world.barrier()
"""


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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_world_of_a_process_group(group, size):
    codes, outputs = run(size, PROGRAM + GROUPS[group])
    assert codes == [0] * size, "\n".join(outputs)


def test_world_outlives_the_process_group():
    codes, outputs = run(2, PROGRAM + GROUPS["gloo"] + LAST)
    assert codes == [0, 0], "\n".join(outputs)


def test_rank_zero_never_calls_init():
    program = """
        import os, torch.distributed as dist, lockstep
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            try:
                lockstep.init(join_timeout=1)
            except lockstep.CommError as error:
                assert error.cause == "JOIN_TIMEOUT" and "rank 0 did not publish" in str(error), error
            else:
                raise AssertionError("joined")
        dist.barrier()
        dist.destroy_process_group()
    """
    codes, outputs = run(2, program)
    assert codes == [0, 0], "\n".join(outputs)


def test_environment_overrides_the_process_group():
    program = """
        import torch.distributed as dist, lockstep
        dist.init_process_group("gloo")
        assert lockstep.init().size == 1
        dist.barrier()
        dist.destroy_process_group()
    """
    codes, outputs = run(2, program, LOCKSTEP_ENV_FROM="none")
    assert codes == [0, 0], "\n".join(outputs)


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_error_is_printed(backend):
    """torch's hook for exceptions holds back what ours prints."""
    program = f"""
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("{backend}")
        world = lockstep.init()
        world.all_reduce(torch.ones(3), name="a" * (world.rank + 1))
    """
    codes, outputs = run(2, program)
    assert codes == [70, 70] and all("DesyncError: " in said for said in outputs), (codes, outputs)
