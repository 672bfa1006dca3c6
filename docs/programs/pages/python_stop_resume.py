"""Stops and resumes a training, for docs/how-to/python-recipes.md.

python_stop_resume.py FOLDER: the first start is asked to stop, and exits with code 75; the second one resumes, and
checks that the weights are those of a training without the interruption.
"""

import os
import pathlib
import signal
import sys

import torch

import lockstep

dataset = [(torch.tensor([i / 100, 1 - i / 100]), int(i > 50)) for i in range(100)]
world = lockstep.init()


def train(folder, stop_at=-1):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    # docs: begin loop
    state = lockstep.checkpoint.TrainingState(world, folder)
    if state.is_finished:
        sys.exit()  # an earlier start has completed the training
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)
    loader = lockstep.data.DataLoader(dataset, world, batch_size=5)
    state.add("model", net).add("optimizer", optimizer).add("loader", loader).add("step", 0).add_random_state()
    state.resume()
    for epoch in loader.remaining_epochs(3):
        for x, y in loader.epoch(epoch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            state["step"] += 1
            if world.stop_requested():  # the same on all ranks
                state.save(state["step"])
                sys.exit(lockstep.PREEMPTED)  # 75
            # docs: end loop
            if state["step"] == stop_at and world.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            # docs: begin loop
        state.save_async(state["step"])
    state.save(state["step"], finished=True)
    # docs: end loop
    assert state["step"] == 3 * len(loader)
    return [parameter.detach().clone() for parameter in net.parameters()]


folder = pathlib.Path(sys.argv[1])
is_first = world.broadcast_object(not folder.exists(), 0)
found = train(folder, 13 if is_first else -1)
assert not is_first, "the training was not stopped"
expected = train(folder.with_suffix(".alone"))
assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
