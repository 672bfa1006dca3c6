"""What `import lockstep` leaves as it is, and what the first fused optimizer replaces. One rank; no launcher."""

import subprocess
import sys

# Every attribute of torch's modules and of their classes, what their functions enclose, and sys.exit().
FIND_CHANGES = """
import sys, types
import torch, torch.nn.utils, torch.amp, torch.optim, torch.distributed, torch.autograd.variable, torch.utils.data

def attributes():
    found = {"sys.exit": sys.exit, "sys.excepthook": sys.excepthook}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{member}": one for member, one in vars(value).items()})
            if isinstance(value, types.FunctionType):
                for index, cell in enumerate(value.__closure__ or ()):
                    if cell != types.CellType():  # not empty
                        found[f"{name}.{key} calls {index}"] = cell.cell_contents
    return found

before = attributes()
import lockstep
after = attributes()
changed = [name for name, value in before.items() if after.get(name) is not value]
assert not changed, changed
"""

TRAIN = """
import warnings
import torch

def clip_grad_norm_(parameters, max_norm, *args, **options):
    return torch.nn.utils.clip_grad_value_(parameters, max_norm)

torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
import lockstep

net = torch.nn.Linear(3, 1)
ddp = lockstep.DistributedDataParallel(net, lockstep.init())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = lockstep.optim.SGD(ddp, lr=0.1)
    lockstep.optim.SGD(lockstep.DistributedDataParallel(torch.nn.Linear(3, 1), lockstep.init()), lr=0.1)
texts = [str(one.message) for one in caught if "lockstep" in str(one.message)]
assert len(texts) == 1, texts
assert "clip_grad_norm_()" in texts[0] and "optimizer.average_gradients()" in texts[0], texts
net(torch.ones(2, 3)).sum().backward()
torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
optimizer.step()
assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
"""


def run(program):
    found = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_import_changes_nothing_of_torch():
    run(FIND_CHANGES)


def test_functions_of_an_unknown_torch():
    run(TRAIN)
