"""The program of docs/how-to/slow-networks.md. Each rank is a host of its own, so that all bytes go between hosts; it
trains one small network in several ways and compares the losses."""

import os

os.environ["LOCKSTEP_HOST_ID"] = f"host {os.environ['RANK']}"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import lockstep  # noqa: E402

dist.init_process_group("lockstep")
world = lockstep.init()
assert world.transport == "hierarchy"

STEPS, BATCH = 120, 64


def samples_of(seed, count):
    """Points in 16 dimensions, with the class that a fixed random network gives them."""
    weights = torch.Generator().manual_seed(5)
    teacher = torch.randn(16, 32, generator=weights), torch.randn(32, 4, generator=weights)
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return x, (torch.tanh(x @ teacher[0]) @ teacher[1]).argmax(1)


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def loss_after(run, net, make_equal=lambda: None):
    """Trains `net` through `run`, and returns the loss on samples that no rank has trained on."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = samples_of(1000 * step + world.rank, BATCH)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run(x), y).backward()
        optimizer.step()
    make_equal()
    return evaluate(net)


def evaluate(net):
    with torch.no_grad():
        x, y = samples_of(999_999, 4096)
        return torch.nn.functional.cross_entropy(net(x), y).item()


def every_step():
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    assert ddp.module is net
    return loss_after(net, net)


def bfloat16():
    net = make_net()
    # docs: begin bfloat16
    ddp = lockstep.DistributedDataParallel(net, world, wire_dtype=torch.bfloat16)
    # docs: end bfloat16
    assert ddp.module is net
    return loss_after(net, net)


def every_8_steps():
    net = make_net()
    # docs: begin every
    ddp = lockstep.DistributedDataParallel(net, world, average_hosts_every=8)
    # docs: end every
    return loss_after(net, net, ddp.average_hosts)


def every_8_steps_of_ddp():
    # docs: begin ddp
    net = torch.nn.parallel.DistributedDataParallel(make_net())
    hosts = lockstep.HostSync(net, every=8)
    # docs: end ddp
    return loss_after(net, net.module, hosts.sync)


def outer_optimizer():
    net = make_net()
    # docs: begin outer
    outer = lockstep.DiLoCo(payload="int8")
    ddp = lockstep.DistributedDataParallel(net, world, average_hosts_every=30, outer=outer)
    # ... the loop of the training
    # docs: end outer
    loss = loss_after(net, net)
    # docs: begin outer
    loss_of_all = ddp.with_global_copy(lambda: evaluate(net))
    # docs: end outer
    assert abs(loss_of_all - loss) < 0.1 * loss
    return loss_of_all


def outer_optimizer_of_ddp():
    # docs: begin outer-ddp
    net = torch.nn.parallel.DistributedDataParallel(make_net())
    hosts = lockstep.HostSync(net, every=30, outer=lockstep.DiLoCo(payload="int8"))
    # ... the loop of the training
    # docs: end outer-ddp
    loss_after(net, net.module)
    # docs: begin outer-ddp
    loss_of_all = hosts.with_global_copy(lambda: evaluate(net.module))
    # docs: end outer-ddp
    return loss_of_all


def approximated():
    net = make_net()
    # docs: begin powersgd
    ddp = lockstep.DistributedDataParallel(net, world, hook=lockstep.PowerSGD(rank=4))
    # docs: end powersgd
    assert ddp.module is net
    return loss_after(net, net)


def as_int8():
    net = make_net()
    # docs: begin int8
    ddp = lockstep.DistributedDataParallel(net, world, hook=lockstep.Int8())
    # docs: end int8
    assert ddp.module is net
    return loss_after(net, net)


def both():
    net = make_net()
    # docs: begin both
    ddp = lockstep.DistributedDataParallel(net, world, wire_dtype=torch.bfloat16, average_hosts_every=8)
    # ... the loop of the training
    # docs: end both
    loss = loss_after(net, net)
    # docs: begin both
    ddp.average_hosts()  # before an evaluation or a save
    # docs: end both
    return loss


ways = (
    every_step,
    bfloat16,
    every_8_steps,
    every_8_steps_of_ddp,
    outer_optimizer,
    outer_optimizer_of_ddp,
    approximated,
    as_int8,
)
losses = {way.__name__: way() for way in ways}
both()
if world.rank == 0:
    for name, loss in losses.items():
        print(f"{name:24} {loss:.4f} {loss / losses['every_step'] - 1:+.1%}")
assert abs(losses["bfloat16"] / losses["every_step"] - 1) < 0.01
assert abs(losses["every_8_steps"] / losses["every_step"] - 1) < 0.1
assert abs(losses["every_8_steps_of_ddp"] / losses["every_8_steps"] - 1) < 0.05
assert abs(losses["outer_optimizer"] / losses["every_step"] - 1) < 0.15
assert abs(losses["outer_optimizer_of_ddp"] / losses["outer_optimizer"] - 1) < 0.05
assert abs(losses["approximated"] / losses["every_step"] - 1) < 0.05
assert abs(losses["as_int8"] / losses["every_step"] - 1) < 0.01
assert set(world.all_gather_object(list(losses.values()))[0]) == set(losses.values())
dist.destroy_process_group()
