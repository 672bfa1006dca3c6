"""The program of docs/how-to/accelerate-transformers.md, beside the old one, which runs first in the same ranks."""

import accelerate_before as before
import torch

# docs: begin program
import torch.distributed as dist
from accelerate import Accelerator

# docs: end program
from accelerate.state import AcceleratorState
from accelerate_before import loss_function, make

import lockstep  # noqa: F401  in a build folder; an installed package registers the backend by itself

torch.distributed.destroy_process_group()
AcceleratorState._reset_state(reset_partial_state=True)
net, optimizer, loader = make()
losses = []

# docs: begin program
dist.init_process_group("lockstep")
accelerator = Accelerator(cpu=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_function(net(x), y)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(accelerator.gather(loss.detach()).mean().item())
# docs: end program

assert dist.get_backend() == "lockstep"
assert torch.allclose(torch.tensor(losses), torch.tensor(before.losses), rtol=1e-5), (before.losses, losses)
