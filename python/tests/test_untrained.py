"""Models that no DistributedDataParallel averages although their ranks train them."""

import copy
import gc
import io
import os
import subprocess
import sys

import pytest
import torch
from ranks import on_ranks
from training import gradients, loss_of, make_net, own_data, reference

import lockstep

PROGRAM = """\
import copy, sys, torch, lockstep

def train(net, optimizers, steps, averaged=()):
    for step in range(steps):
        for one in optimizers:
            one.zero_grad()
        net(torch.full((8, 4), 1.0 + world.rank + step)).square().mean().backward()
        for p in averaged:
            world.all_reduce(p.grad, "mean")
        for one in optimizers:
            one.step()

def main(how):
    torch.manual_seed(0)
    encoder, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    net = torch.nn.Sequential(encoder, head)
    has_whole = how in ("anew", "probe", "ignored")
    ignore = ["1.weight", "1.bias"] if how == "ignored" else []
    ddp = lockstep.DistributedDataParallel(net if has_whole else encoder, world, ignore=ignore)
    if how == "anew":
        net = copy.deepcopy(net)
    parts = [encoder, head] if how == "own optimizer" else [net]
    if how == "group of one":  # each rank has a model of its own
        torch.manual_seed(world.rank)
        net = torch.nn.Linear(4, 2)
        parts, own = [net], lockstep.DistributedDataParallel(net, world.split(world.rank))
    if how == "probe":  # rank 0 alone trains another model
        net, parts = head, [copy.deepcopy(head)] * (world.rank == 0)
    if parts:
        optimizers = [torch.optim.SGD(part.parameters(), 1e-3) for part in parts]
        train(parts[0] if how == "probe" else net, optimizers, 3, list(head.parameters()) if how == "by hand" else ())

world = lockstep.init()
if sys.argv[2] == "local":  # the world ends before the process does
    own, world = world, None
    def call(world):
        globals()["world"] = world
        main(sys.argv[1])
        del globals()["world"]
    call(own)
    del own
else:
    main(sys.argv[1])
print("trained", flush=True)
"""


def run(tmp_path, size, how, where):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    words = [
        os.environ["LOCKSTEP_PROGRAM"],
        "run",
        "-n",
        str(size),
        "--bind",
        "none",
        "--",
        sys.executable,
        script,
        how,
        where,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.count("trained\n") == size, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("size", "how", "where"), [(1, "half", "global"), (2, "half", "local"), (3, "anew", "global")])
def test_parameters_that_only_an_optimizer_has_are_an_error_at_the_end(tmp_path, size, how, where):
    done = run(tmp_path, size, how, where)
    assert (done.returncode == 0) == (size == 1), done.stderr
    what = "trained parameters that belong to no" if how == "half" else "trained a model that belongs to no"
    assert (what in done.stderr) == (size > 1) and ("FATAL" in done.stderr) == (size > 1), done.stderr


@pytest.mark.parametrize("how", ("own optimizer", "by hand", "ignored", "probe", "group of one"))
def test_what_a_program_does_on_purpose_is_none(tmp_path, how):
    done = run(tmp_path, 2, how, "global")
    assert done.returncode == 0, done.stderr


def make_and_drop(net, world):
    lockstep.DistributedDataParallel(net, world)


@on_ranks(1, 2, 3)
def test_model_whose_object_a_function_has_dropped(world):
    net = make_net()
    make_and_drop(net, world)
    for _ in range(2):
        net.zero_grad()
        loss_of(net, *own_data(world)).backward()
        if world.size > 1:
            expected = reference(lambda net, x, y: loss_of(net, x, y).backward())
            for name, gradient in gradients(net).items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    assert list(net.state_dict()) == list(make_net().state_dict())


@on_ranks(2)
def test_object_of_a_module_ends(world):
    """After it has averaged, with the object; else when another one is made, or with the module."""
    net = make_net()
    x, y = own_data(world)
    ddp = lockstep.DistributedDataParallel(net, world)
    loss_of(net, x, y).backward()
    del ddp
    if world.rank == 0:
        loss_of(net, x, y).backward()  # of this rank alone
    make_and_drop(net, world)
    ddp = lockstep.DistributedDataParallel(net, world)
    net.zero_grad()
    loss_of(net, x, y).backward()
    del ddp
    dropped = make_net()
    make_and_drop(dropped, world)
    copies = [torch.load(save(dropped), weights_only=False), copy.deepcopy(dropped)]
    if world.rank == 0:
        for one in copies:
            loss_of(one, x, y).backward()
    number = number_of_objects()
    del dropped
    assert number_of_objects() == number - 1
    world.barrier()


def number_of_objects():
    return len([one for one in gc.get_objects() if isinstance(one, lockstep.DistributedDataParallel)])


def save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file
