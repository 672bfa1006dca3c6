"""The program of docs/how-to/own-all-reduce.md after the change. It compares its losses with those of
own_all_reduce_before.py.

lockstep run -n 2 python own_all_reduce.py
lockstep run -n 2 python own_all_reduce.py --measure     # the time of a step, beside that of the loop
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

# docs: begin loop
import lockstep

# docs: end loop

loss_function = torch.nn.functional.mse_loss
losses = []


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batches(rank, num_steps=6):
    for step in range(num_steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        yield x, x.sum(1, keepdim=True).sin()


# docs: begin loop
world = lockstep.init()
net = make_net()
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.SGD(ddp, lr=0.1)

for x, y in batches(world.rank):
    optimizer.zero_grad()
    loss = loss_function(net(x), y)
    loss.backward()
    optimizer.step()
    # docs: end loop
    mean = loss.detach().clone()
    world.all_reduce(mean, "mean")
    losses.append(mean.item())


def compare_with_the_loop():
    import own_all_reduce_before as before  # it trains when it is imported

    torch.testing.assert_close(torch.tensor(losses), torch.tensor(before.losses))
    for one, other in zip(net.parameters(), before.net.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def keep_the_loop():
    net = make_net()
    x, y = next(batches(world.rank))
    loss_function(net(x), y).backward()
    # docs: begin keep
    for p in net.parameters():
        world.all_reduce(p.grad, "mean")
    # docs: end keep
    everyone = world.all_gather_object(net[0].weight.grad)
    assert all(torch.equal(one, everyone[0]) for one in everyone)


def measure(num_rounds=15):
    """Prints the time of a step of each kind, from rounds in which all make steps in turns."""
    dist.init_process_group("gloo")
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(world.rank))
    sgd = {"lr": 1e-3, "momentum": 0.9}

    def make():
        torch.manual_seed(1)
        linears = [torch.nn.Linear(512, 512) for _ in range(24)]
        return torch.nn.Sequential(*[layer for linear in linears for layer in (linear, torch.nn.ReLU())])

    def average_over_gloo(net):
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world.size

    nets = [make() for _ in range(4)]
    wrapped = torch.nn.parallel.DistributedDataParallel(nets[1])
    ddps = [lockstep.DistributedDataParallel(net, world) for net in nets[2:]]
    kinds = {
        "loop over Gloo": (nets[0], torch.optim.SGD(nets[0].parameters(), **sgd)),
        "DistributedDataParallel of PyTorch over Gloo": (wrapped, torch.optim.SGD(nets[1].parameters(), **sgd)),
        "lockstep, torch.optim": (nets[2], torch.optim.SGD(nets[2].parameters(), **sgd)),
        "lockstep, lockstep.optim": (nets[3], lockstep.optim.SGD(ddps[1], **sgd)),
    }
    times = {name: [] for name in kinds}
    for number in range(num_rounds + 3):
        for name, (net, optimizer) in kinds.items():
            world.barrier()
            start = time.perf_counter()
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                if net is nets[0]:
                    average_over_gloo(net)
                optimizer.step()
            world.barrier()
            if number >= 3:
                times[name].append((time.perf_counter() - start) / 3)
    loop = times["loop over Gloo"]
    for name, found in times.items() if world.rank == 0 else ():
        ratio = statistics.median(a / b for a, b in zip(loop, found, strict=True))
        print(f"{name}: {1000 * statistics.median(found):.1f} ms per step; the loop takes {ratio:.2f} times as long")


if "--measure" in sys.argv[1:]:
    measure()
else:
    keep_the_loop()
    compare_with_the_loop()
