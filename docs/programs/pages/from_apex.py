"""The programs of docs/how-to/from-apex.md: what takes the place of Apex. Apex itself is not needed.

lockstep run -n 2 python from_apex.py
"""

import torch

import lockstep

world = lockstep.init()


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def own_batches(steps=6):
    return [batch(step, world.rank) for step in range(steps)]


def whole_batch(step):
    """The batches of all ranks, for the comparison with a training in one process."""
    parts = [batch(step, rank) for rank in range(world.size)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


loss_function = torch.nn.functional.mse_loss


def train_with_autocast(infinite_step=None):
    """Returns the mean losses over all ranks, the weights after each step, and the last scale."""
    net = make_net()
    losses, weights = [], []
    # docs: begin loop
    half = torch.float16 if world.device.type == "cuda" else torch.bfloat16
    net = net.to(world.device)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.AdamW(ddp, lr=1e-2, weight_decay=0.0)
    scaler = torch.amp.GradScaler(world.device.type)

    for x, y in own_batches():
        optimizer.zero_grad()
        with torch.autocast(world.device.type, dtype=half):
            loss = loss_function(net(x), y)
        # docs: end loop
        losses.append(sum(world.all_gather_object(loss.item())) / world.size)
        if len(weights) == infinite_step and world.rank == world.size - 1:
            loss = loss * float("inf")
        # docs: begin loop
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        # docs: end loop
        weights.append(net[0].weight.detach().clone())
    return losses, weights, scaler.get_scale()


def train_alone():
    """The same in one process, with the batches of all ranks and torch's optimizer."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(6):
        x, y = whole_batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_function(net(x), y)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return losses


losses, weights, scale = train_with_autocast()
torch.testing.assert_close(torch.tensor(losses), torch.tensor(train_alone()), rtol=2e-2, atol=1e-2)
assert scale == 65536.0
_, weights, scale = train_with_autocast(infinite_step=3)  # an infinity on one rank is a skipped step on all
assert torch.equal(weights[2], weights[3]) and not torch.equal(weights[3], weights[4])
assert scale == 32768.0
assert world.all_gather_object(scale) == [scale] * world.size


def train_two_losses():
    generator, discriminator = make_net(), make_net()
    ddp0 = lockstep.DistributedDataParallel(generator, world)
    ddp1 = lockstep.DistributedDataParallel(discriminator, world)
    optimizer0, optimizer1 = lockstep.optim.SGD(ddp0, lr=0.01), lockstep.optim.SGD(ddp1, lr=0.01)
    x, y = batch(0, world.rank)
    scaler = torch.amp.GradScaler(world.device.type, init_scale=1024.0)
    before = generator[0].weight.detach().clone()
    loss0, loss1 = loss_function(generator(x), y), loss_function(discriminator(x), y) * float("inf")
    # docs: begin losses
    scaler.scale(loss0).backward()
    scaler.scale(loss1).backward()
    scaler.step(optimizer0)  # each optimizer skips by its own gradients
    scaler.step(optimizer1)
    scaler.update()  # once, at the end
    # docs: end losses
    assert not torch.equal(before, generator[0].weight) and torch.equal(before, discriminator[0].weight)
    assert scaler.get_scale() == 512.0


def train_accumulating(num_parts):
    """Returns the weights after two steps, whose batches are divided into parts."""
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.SGD(ddp, lr=0.1)
    scaler = torch.amp.GradScaler(world.device.type, init_scale=1024.0)
    for x, y in own_batches(2):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(num_parts), y.chunk(num_parts), strict=True))
        # docs: begin accumulate
        with ddp.no_sync():
            for x, y in parts[:-1]:
                loss = loss_function(net(x), y) / len(parts)
                scaler.scale(loss).backward()
        x, y = parts[-1]
        scaler.scale(loss_function(net(x), y) / len(parts)).backward()
        scaler.step(optimizer)  # unscales the sum, once
        scaler.update()
        # docs: end accumulate
    return net[0].weight.detach()


train_two_losses()
torch.testing.assert_close(train_accumulating(4), train_accumulating(1))


def train_lamb():
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    # docs: begin lamb
    no_decay = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": no_decay, "weight_decay": 0.0, "adapt": False}]
    optimizer = lockstep.optim.LAMB(ddp, lr=1e-2, weight_decay=0.01, groups=groups)
    # docs: end lamb
    for x, y in own_batches():
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    return loss.item()


assert train_lamb() < 1


# docs: begin larc
@torch.no_grad()
def apply_larc(optimizer, weight_decay=0.0, trust_coefficient=0.02, clip=True, eps=1e-8):
    """Call it between backward() and step(). The weight decay is given here, and not to the optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None or not p.any() or not p.grad.any():
                continue
            ratio = trust_coefficient * p.norm() / (p.grad.norm() + weight_decay * p.norm() + eps)
            if clip:
                ratio = (ratio / group["lr"]).clamp(max=1)
            p.grad.add_(p, alpha=weight_decay).mul_(ratio)
    # docs: end larc


def train_larc(clip):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.SGD(ddp, lr=0.1, momentum=0.9, average_in_backward=True)
    for x, y in own_batches():
        optimizer.zero_grad()
        loss_function(net(x), y).backward()
        apply_larc(optimizer, weight_decay=1e-4, clip=clip)
        optimizer.step()
    return net[0].weight.detach().clone()


def train_lars():
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.LARS(ddp, lr=0.1, weight_decay=1e-4, trust_coefficient=0.02)
    for x, y in own_batches():
        optimizer.zero_grad()
        loss_function(net(x), y).backward()
        optimizer.step()
    return net[0].weight.detach().clone()


torch.testing.assert_close(train_larc(clip=False), train_lars(), rtol=1e-4, atol=1e-6)
assert not torch.allclose(train_larc(clip=True), train_lars())


def train_batch_norm():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    # docs: begin batch_norm
    net = lockstep.nn.convert_sync_batch_norm(net, world)  # was: apex.parallel.convert_syncbn_model(net)
    # docs: end batch_norm
    lockstep.DistributedDataParallel(net, world)
    x, y = batch(0, world.rank)
    with torch.autocast(world.device.type, dtype=torch.bfloat16):
        loss = loss_function(net(x), y)
    loss.backward()
    assert net[1].weight.dtype == net[1].running_mean.dtype == torch.float32
    everyone = world.all_gather_object(net[1].running_mean.clone())
    assert all(torch.equal(one, everyone[0]) for one in everyone)


def train_in_bfloat16():
    net = make_net()
    # docs: begin o3
    net = net.to(torch.bfloat16)
    # docs: end o3
    optimizer = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.05)
    losses = []
    x, y = batch(0, world.rank)
    for _ in range(6):
        optimizer.zero_grad()
        loss = loss_function(net(x.bfloat16()), y.bfloat16())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and next(net.parameters()).dtype == torch.bfloat16


train_batch_norm()
train_in_bfloat16()


def load_old_state():
    """A state with the layout of FusedAdam's is made from one of torch.optim.AdamW."""
    nets = [make_net(), make_net()]
    theirs = torch.optim.AdamW(nets[0].parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
        theirs.zero_grad()
        loss_function(nets[0](whole_batch(step)[0]), whole_batch(step)[1]).backward()
        theirs.step()
    old = theirs.state_dict()
    for state in old["state"].values():
        old["param_groups"][0]["step"] = int(state.pop("step"))
    old["param_groups"][0]["bias_correction"] = True
    nets[1].load_state_dict(nets[0].state_dict())
    ours = lockstep.optim.AdamW(lockstep.DistributedDataParallel(nets[1], world), lr=1e-2, weight_decay=0.0)
    optimizer = ours
    # docs: begin state
    for group in old["param_groups"]:
        for number in group["params"]:
            old["state"][number]["step"] = torch.tensor(float(group["step"]))
    optimizer.load_state_dict(old)
    # docs: end state
    theirs.load_state_dict(old)
    for net, optimizer, (x, y) in ((nets[0], theirs, whole_batch(3)), (nets[1], ours, batch(3, world.rank))):
        optimizer.zero_grad()
        loss_function(net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(nets[0][0].weight, nets[1][0].weight, rtol=1e-4, atol=1e-5)


load_old_state()
