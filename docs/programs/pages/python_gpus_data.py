"""The model and the data of python_gpus.py and python_gpus_before.py, and their losses in one process."""

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(torch.relu(self.hidden(x)))


_inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(_inputs, _inputs[:, :4].argmax(1))


def losses_alone(batches, device):
    """Returns the losses of two epochs in one process. `batches` are those of all ranks together in each epoch."""
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        for x, y in batches(epoch):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = functional.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.tensor(losses)


def check(losses, batches, device):
    """`losses` are those of the steps, as the mean over all ranks."""
    torch.testing.assert_close(losses, losses_alone(batches, device), rtol=0.02, atol=0.02)
    assert losses[-1] < 0.8 * losses[0], losses
