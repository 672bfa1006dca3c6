"""A training of two simulated hosts with an outer optimizer, which saves every few steps and may be killed.

argv: folder, method, seconds until the ranks of the second host are killed in the first generation (0: never), and
"real" if the hosts are not simulated. Method "horovod": with hvd.DistributedOptimizer, without checkpoints.
"""

import os
import pathlib
import signal
import sys
import threading

RANK, SIZE = int(os.environ["LOCKSTEP_RANK"]), int(os.environ["LOCKSTEP_WORLD_SIZE"])
HOST = RANK * 2 // SIZE
IS_SIMULATED = sys.argv[4:] != ["real"]
if IS_SIMULATED:
    os.environ["LOCKSTEP_HOST_ID"] = f"host {HOST}"
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES"):
        os.environ.pop(f"LOCKSTEP_{name}", None)  # the launcher's values describe the real host

import torch  # noqa: E402

import lockstep  # noqa: E402

METHODS = {
    "average": None,
    "int8": lockstep.DiLoCo(payload="int8"),
    "warm-up": lockstep.DiLoCo(payload="int4", warm_up=10),
    "sparse": lockstep.SparseLoCo(),
}
STEPS, EVERY, SAVE_EVERY = 200 if IS_SIMULATED else 4000, 7, 11


def with_horovod(folder):
    import lockstep.horovod as hvd

    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, average_hosts_every=EVERY, outer=METHODS["int8"])
    sums = []
    for step in range(2 * EVERY):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + RANK))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        sums.append(net.weight.sum().item())
    everyone = hvd.allgather_object(sums)
    for step, values in enumerate(zip(*everyone, strict=True)):
        assert values[0] == values[1] and values[2] == values[3], "the ranks of a host are equal"
        assert (values[0] == values[2]) == (step % EVERY == EVERY - 1), f"hosts are equal after a round: {step}"
    (folder / f"{RANK}").write_text(str(sums[-1]))


def main():
    if sys.argv[2] == "horovod":
        return with_horovod(pathlib.Path(sys.argv[1]))
    folder, method, seconds = pathlib.Path(sys.argv[1]), METHODS[sys.argv[2]], float(sys.argv[3])
    world = lockstep.init()
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
    ddp = lockstep.DistributedDataParallel(net, world, average_hosts_every=EVERY, outer=method)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = lockstep.checkpoint.TrainingState(world, folder / "checkpoints")
    state.add("model", net).add("optimizer", optimizer, net).add("ddp", ddp).add_random_state()
    state.resume()
    if seconds and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and HOST == 1:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(state.step, STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + RANK))
        optimizer.zero_grad()
        torch.nn.functional.dropout(net(x), 0.1).square().mean().backward()
        optimizer.step()
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            state.save_async(step + 1)
    ddp.average_hosts()
    final = torch.cat([p.detach().flatten() for p in net.parameters()])
    (folder / f"{RANK}").write_text(str(final.double().tolist()))
    print(f"resumed from step {state.step}")


main()
