"""The programs of docs/how-to/from-lightning.md, beside the old one, which runs first in the same ranks."""

import functools
import os
import tempfile

import from_lightning_before as before

# docs: begin strategy
import lockstep.lightning

# docs: end strategy
import torch
from from_lightning_before import DataLoader, Model, loss_function, make_net, pl, train_set, val_set

# docs: begin loop
import lockstep

# docs: end loop
torch.distributed.destroy_process_group()
best = pl.callbacks.ModelCheckpoint(before.folder, monitor="val_loss")

# docs: begin strategy
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="lockstep",
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[best],
)
# docs: end strategy
trainer.fit(Model(), DataLoader(train_set, batch_size=4), DataLoader(val_set, batch_size=4))
val_loss = trainer.callback_metrics["val_loss"].item()
assert abs(val_loss - before.val_loss) < 1e-5, (before.val_loss, val_loss)
torch.distributed.destroy_process_group()

# As before, in the order of the dataset.
lockstep.data.DataLoader = functools.partial(lockstep.data.DataLoader, shuffle=False)
# docs: begin loop
world = lockstep.init()
# docs: end loop
_temporary = tempfile.TemporaryDirectory()
folder = world.broadcast_object(_temporary.name, 0)
os.chdir(folder)
# docs: begin loop
state = lockstep.checkpoint.TrainingState(world, "runs/net/checkpoints")
if state.is_finished:
    raise SystemExit  # an earlier start has completed the training
net = make_net()
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)
train_loader = lockstep.data.DataLoader(train_set, world, batch_size=4)
val_loader = lockstep.data.DataLoader(val_set, world, batch_size=4, mode="exact")


@torch.no_grad()
def evaluate():
    net.eval()
    total = torch.zeros(2, dtype=torch.float64)  # the sum of the losses, and the number of samples
    for x, y in val_loader.epoch(0):
        total += torch.tensor([loss_function(net(x), y).item() * len(x), len(x)])
    net.train()
    world.all_reduce(total)
    return (total[0] / total[1]).item()  # the same on all ranks


state.add("model", net).add("optimizer", optimizer).add("loader", train_loader)
state.add("step", 0).add("best", float("inf")).add("bad_epochs", 0).add_random_state()
state.resume()
for epoch in train_loader.remaining_epochs(2):
    for i, (x, y) in enumerate(train_loader.epoch(epoch)):
        (loss_function(net(x), y) / 2).backward()  # accumulate_grad_batches=2
        if i % 2 == 0:
            continue
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if world.stop_requested():  # SIGTERM, SIGUSR1 or Ctrl-C
            state.save(state["step"])
            raise SystemExit(lockstep.PREEMPTED)
    val_loss = evaluate()
    is_best = val_loss < state["best"]
    state["best"] = min(val_loss, state["best"])
    state["bad_epochs"] = 0 if is_best else state["bad_epochs"] + 1
    if world.rank == 0:
        print(f"epoch {epoch}: val_loss {val_loss:.4f}", flush=True)
        if is_best:
            torch.save(net.state_dict(), "best.pt")
    state.save_async(state["step"])
    if state["bad_epochs"] == 3:
        break  # EarlyStopping(patience=3)
state.save(state["step"], finished=True)
# docs: end loop

assert abs(val_loss - before.val_loss) < 1e-5, (before.val_loss, val_loss)
assert state["step"] == 10
checkpoint = before.checkpoint

# docs: begin weights
weights = torch.load(checkpoint, weights_only=True)["state_dict"]
torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "net.")
net.load_state_dict(weights)
# docs: end weights

assert abs(evaluate() - before.best.best_model_score.item()) < 1e-5
world.barrier()  # the folder of rank 0 goes with its process
