"""The old program of docs/how-to/accelerate-transformers.md. accelerate_training.py imports this file."""

import torch

# docs: begin program
from accelerate import Accelerator

# docs: end program

generator = torch.Generator().manual_seed(1)
x = torch.randn(80, 4, generator=generator)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loss_function = torch.nn.functional.mse_loss


def make():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2), torch.utils.data.DataLoader(dataset, batch_size=4)


net, optimizer, loader = make()
losses = []

# docs: begin program
accelerator = Accelerator(cpu=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_function(net(x), y)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(accelerator.gather(loss.detach()).mean().item())
# docs: end program

assert accelerator.num_processes > 1 and len(losses) == 20 / accelerator.num_processes
assert losses[-1] < losses[0]
