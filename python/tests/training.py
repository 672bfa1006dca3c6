"""A small training whose gradients on any number of ranks are compared with those of one rank on the whole batch."""

import torch
from torch import nn
from torch.nn import functional

SIZES = (1, 2, 3, 4)
BATCH = 12  # divisible by 1, 2, 3 and 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, branch=True):
        x = torch.tanh(self.first(x))
        if branch:
            x = torch.tanh(self.second(x))
        return self.third(x)

    def predict(self, x):
        return self(x).argmax(1)


def data(step=0):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def own(world, tensor):
    part = BATCH // world.size
    return tensor[world.rank * part : (world.rank + 1) * part]


def own_data(world, step=0):
    return [own(world, tensor) for tensor in data(step)]


def loss_of(net, x, y, **more):
    return functional.cross_entropy(net(x, **more), y)


def make_net():
    torch.manual_seed(7)
    return Net()


def gradients(net):
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def expect_gradients(net, expected, message=""):
    for name, gradient in gradients(net).items():
        if expected[name] is None:
            assert gradient is None, (message, name)
        else:
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{message} {name}: {m}"
            )


def reference(backward):
    """Returns the gradients of one rank on the whole batch."""
    net = make_net()
    backward(net, *data())
    return gradients(net)
