"""The program about data and checkpoints in docs/guide/08-python.md. Run twice, it trains once."""

import os
import tempfile

import torch

dataset = [(torch.tensor([i / 100, 1 - i / 100]), int(i > 50)) for i in range(100)]
torch.manual_seed(1)
_temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = os.environ.get("RESUME_FOLDER") or _temporary.name
num_epochs = 2
loss = None

# docs: begin program
import sys  # noqa: E402

import lockstep  # noqa: E402

world = lockstep.init()
state = lockstep.checkpoint.TrainingState(world, f"{world.broadcast_object(folder, 0)}/checkpoints")
if state.is_finished:
    sys.exit()  # an earlier start has completed the training
net = torch.nn.Linear(2, 2)
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)
loader = lockstep.data.DataLoader(dataset, world, batch_size=10, num_workers=0)
state.add("model", net).add("optimizer", optimizer).add("loader", loader).add("step", 0).add_random_state()
state.resume()
for epoch in loader.remaining_epochs(num_epochs):
    for x, y in loader.epoch(epoch):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        state["step"] += 1
    state.save_async(state["step"])  # returns at once
state.save(state["step"], finished=True)
# docs: end program

assert loss is not None and state["step"] == num_epochs * len(loader)
