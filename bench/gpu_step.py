"""Runs the step of gpu_step.cc in PyTorch, with the same models, names, initial weights, data, requests and results.

Usage: gpu_step.py IMPL MODEL SIZE PRECISION BATCH DEVICE THREADS. Started by gpu.py.
IMPL: pytorch-ddp-loop, pytorch-ddp (a foreach optimizer, torch's default on a GPU) or pytorch-ddp-fused, each in a
DistributedDataParallel of one rank, or pytorch (a foreach optimizer, without DistributedDataParallel).
"""

import json
import math
import resource
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

AUTOCAST = {"32": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
OPTIMIZER_OPTIONS = {
    "pytorch-ddp-loop": {"foreach": False},
    "pytorch-ddp": {"foreach": True},
    "pytorch-ddp-fused": {"fused": True},
    "pytorch": {"foreach": True},
}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))

    def attend(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, length, width))


class Gpt(nn.Module):
    """The model of examples/03_char_gpt/gpt.h."""

    def __init__(self, vocabulary, block, width, layers, heads):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text):
        x = self.characters(text) + self.positions(torch.arange(text.size(1), device=text.device))
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(torch.matmul(self.norm(x), self.characters.weight.t()), -1)


def set_weights(net):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in sorted(net.named_parameters()):
            if value.dim() > 1:
                value.normal_(0, 1 / math.sqrt(value.numel() // value.size(0)))
            else:
                value.fill_(0 if "bias" in name else 1)


def make_gpt(tiny, batch):
    shape = (
        {"vocabulary": 101, "block": 16, "width": 32, "layers": 2, "heads": 4}
        if tiny
        else {"vocabulary": 50257, "block": 1024, "width": 768, "layers": 12, "heads": 12}
    )
    net = Gpt(**shape)
    set_weights(net)
    torch.manual_seed(2)
    text, following = (torch.randint(shape["vocabulary"], (batch, shape["block"])) for _ in range(2))
    return net, text, following, lambda output, target: functional.nll_loss(output.flatten(0, 1), target.flatten())


def convolution(source, to, kernel, stride):
    return nn.Conv2d(source, to, kernel, stride, kernel // 2, bias=False)


class Residual(nn.Module):
    """Base of residual blocks, with the shortcut."""

    def __init__(self, source, to, stride):
        super().__init__()
        self.downsample = (
            nn.Sequential(convolution(source, to, 1, stride), nn.BatchNorm2d(to))
            if stride != 1 or source != to
            else None
        )

    def shortcut(self, x):
        return x if self.downsample is None else self.downsample(x)


class Basic(Residual):
    def __init__(self, source, width, stride):
        super().__init__(source, width, stride)
        self.conv1, self.bn1 = convolution(source, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(Residual):
    def __init__(self, source, width, stride):
        super().__init__(source, 4 * width, stride)
        self.conv1, self.bn1 = convolution(source, width, 1, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1, 1), nn.BatchNorm2d(4 * width)

    def forward(self, x):
        y = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The model of examples/04_imagenet/resnet.h."""

    def __init__(self, block, blocks, widening, classes):
        super().__init__()
        self.conv1, self.bn1 = convolution(3, 64, 7, 2), nn.BatchNorm2d(64)
        source = 64
        for stage, count in enumerate(blocks):
            width, parts = 64 << stage, []
            for number in range(count):
                parts.append(block(source, width, 2 if stage > 0 and number == 0 else 1))
                source = widening * width
            setattr(self, f"layer{stage + 1}", nn.Sequential(*parts))
        self.fc = nn.Linear(source, classes)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))


def make_resnet(tiny, batch):
    side, classes = (64, 10) if tiny else (224, 1000)
    net = ResNet(Basic, [2, 2, 2, 2], 1, classes) if tiny else ResNet(Bottleneck, [3, 4, 6, 3], 4, classes)
    set_weights(net)
    torch.manual_seed(2)
    return net, torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)), functional.cross_entropy


def adamw(parameters, options):
    return torch.optim.AdamW(parameters, 3e-4, weight_decay=1e-2, **options)


def sgd(parameters, options):
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9, **options)


MODELS = {"gpt": (make_gpt, adamw), "resnet50": (make_resnet, sgd)}


class Training:
    def __init__(self, impl, model, size, precision, batch, device):
        make, make_optimizer = MODELS[model]
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        net, data, target, self.loss = make(size == "tiny", batch)
        self.net, self.input, self.target = net.to(self.device), data.to(self.device), target.to(self.device)
        self.parameters = sum(parameter.numel() for parameter in net.parameters())
        if impl != "pytorch":
            store = dist.FileStore(tempfile.NamedTemporaryFile(prefix="lockstep-bench-").name, 1)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
            self.net = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = make_optimizer(self.net.parameters(), OPTIMIZER_OPTIONS[impl])
        self.dtype = AUTOCAST[precision]
        self.scaler = torch.amp.GradScaler(device, init_scale=1024, enabled=precision == "fp16-mixed")

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = self.loss(self.net(self.input), self.target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self):
        if self.device.type == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_bytes": used, "reserved_bytes": used}

    def measure(self, warm_up, measured):
        losses = [self.step() for _ in range(warm_up)]
        self.synchronize()
        begin = time.perf_counter()
        losses += [self.step() for _ in range(measured)]
        self.synchronize()
        seconds = time.perf_counter() - begin
        return {**self.memory(), "ms": 1e3 * seconds / max(measured, 1), "losses": [loss.item() for loss in losses]}


def print_json(line):
    print(json.dumps(line), flush=True)


def main():
    impl, model, size, precision, batch, device, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if device == "cuda" and not torch.cuda.is_available():
        print_json({"refused": 'DEVICE is "cuda", but torch.cuda.is_available() is false; expected cpu'})
        return 64
    try:
        training = Training(impl, model, size, precision, int(batch), device)
        print_json(
            {
                "parameters": training.parameters,
                "device": str(training.device),
                "libtorch": torch.__version__.split("+")[0],
                **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
            }
        )
        for line in sys.stdin:
            print_json(training.measure(*map(int, line.split())))
    except (torch.OutOfMemoryError, MemoryError) as error:
        print_json({"out_of_memory": str(error).splitlines()[0]})
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        print_json({"out_of_memory": str(error).splitlines()[0]})
    return 0


code = main()
if dist.is_initialized():
    dist.destroy_process_group()
sys.exit(code)
