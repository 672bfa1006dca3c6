"""The GAN of docs/how-to/several-models.md with torch.distributed. Started by torchrun."""

import torch
import torch.distributed as dist
from several_models_data import batches_of, bce, losses_alone, make_models
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam

dist.init_process_group("gloo")
rank = dist.get_rank()
generator, discriminator = make_models()
losses = []

# docs: begin gan
net_g = DDP(generator)
net_d = DDP(discriminator, broadcast_buffers=False)
optimizer_g = Adam(net_g.parameters(), lr=1e-2)
optimizer_d = Adam(net_d.parameters(), lr=1e-2)

for real, noise in batches_of(rank):
    fake = net_g(noise)
    optimizer_d.zero_grad()
    loss_d = bce(net_d(real), 1.0)
    loss_d = loss_d + bce(net_d(fake.detach()), 0.0)
    loss_d.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = bce(net_d(fake), 1.0)
    loss_g.backward()
    optimizer_g.step()
    # docs: end gan
    losses.append((loss_d.item(), loss_g.item()))

if rank == 0:
    torch.testing.assert_close(torch.tensor(losses), losses_alone(dist.get_world_size()), rtol=1e-3, atol=1e-4)
dist.destroy_process_group()
