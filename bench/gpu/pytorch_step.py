"""Runs the step of step.cc in PyTorch, with the same models, names, initial weights, data, requests and results.

Usage: pytorch_step.py IMPL MODEL SIZE DEVICE THREADS. Started by proof.py.
IMPL, each in a DistributedDataParallel of one rank unless stated otherwise:
  pytorch-ddp         a foreach optimizer, torch's default on a GPU
  pytorch-ddp-fused   a fused optimizer
  pytorch-compile     the same, and torch.compile()
  pytorch-overhead    the same, and torch.compile(mode="reduce-overhead"), which makes CUDA graphs
  pytorch-graph       a fused and capturable optimizer, the whole step as a torch.cuda.graph, without
                      DistributedDataParallel
"""

import contextlib
import ctypes
import gc
import json
import math
import pathlib
import resource
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/python"))
import gpt_model  # noqa: E402

AUTOCAST = {"32": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
OPTIMIZER_OPTIONS = {
    "pytorch-ddp": {"foreach": True},
    "pytorch-ddp-fused": {"fused": True},
    "pytorch-compile": {"fused": True},
    "pytorch-overhead": {"fused": True},
    "pytorch-graph": {"fused": True},
}
COMPILE = {"pytorch-compile": "default", "pytorch-overhead": "reduce-overhead"}


def set_weights(net):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in sorted(net.named_parameters()):
            if value.dim() > 1:
                value.normal_(0, 1 / math.sqrt(value.numel() // value.size(0)))
            else:
                value.fill_(0 if "bias" in name else 1)


def make_gpt(model, tiny, batch):
    shape = (
        {"vocabulary": 101, "block": 16, "width": 32, "layers": 2, "heads": 4}
        if tiny
        else {"vocabulary": 50257, "block": 1024, "width": 768, "layers": 12, "heads": 12}
    )
    net = gpt_model.Gpt(**shape)
    set_weights(net)
    torch.manual_seed(2)
    length = shape["block"] // 8 if model == "gpt-short" else shape["block"]
    text, following = (torch.randint(shape["vocabulary"], (batch, length)) for _ in range(2))
    return net, text, following, lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten())


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


def make_resnet(model, tiny, batch):
    side, classes = (64, 10) if tiny else (224, 1000)
    if tiny or model == "resnet18":
        net = ResNet(Basic, [2, 2, 2, 2], 1, classes)
    else:
        net = ResNet(Bottleneck, [3, 4, 6, 3], 4, classes)
    set_weights(net)
    torch.manual_seed(2)
    return net, torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)), functional.cross_entropy


def adamw(parameters, options):
    return torch.optim.AdamW(parameters, 3e-4, weight_decay=1e-2, **options)


def sgd(parameters, options):
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9, **options)


MODELS = {
    "gpt": (make_gpt, adamw),
    "gpt-short": (make_gpt, adamw),
    "resnet50": (make_resnet, sgd),
    "resnet18": (make_resnet, sgd),
}


def synchronizations():
    """Returns how often this process has waited for the device, or None if that is not counted."""
    try:
        return ctypes.CDLL(None).count_synchronizations()
    except AttributeError:
        return None


def forget_peak(device):
    """Gives unused memory back to the device, and lets peaks count from now on."""
    gc.collect()  # a DistributedDataParallel that has been used is part of a cycle
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Training:
    def __init__(self, impl, model, size, precision, batch, device):
        make, make_optimizer = MODELS[model]
        self.device = device
        tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        forget_peak(device)
        net, data, target, self.loss = make(model, size == "tiny", batch)
        self.net, self.input, self.target = net.to(device), data.to(device), target.to(device)
        self.parameters = sum(parameter.numel() for parameter in net.parameters())
        options = dict(OPTIMIZER_OPTIONS[impl])
        if impl == "pytorch-graph":
            if model.startswith("gpt") and device.type == "cuda":
                options["capturable"] = True
        else:
            self.net = nn.parallel.DistributedDataParallel(self.net)
        if impl in COMPILE:
            torch.compiler.reset()
            self.net = torch.compile(self.net, mode=COMPILE[impl])
        self.optimizer = make_optimizer(self.net.parameters(), options)
        self.dtype = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024, enabled=precision == "fp16-mixed")
        self.graph, self.steps, self.use_graph = None, 0, impl == "pytorch-graph" and device.type == "cuda"

    def run_step(self):
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = self.loss(self.net(self.input), self.target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def step(self):
        """Runs a step. With a graph, the first three run eagerly on a stream of their own, as torch's docs require."""
        if not self.use_graph:
            return self.run_step()
        self.steps += 1
        if self.steps <= 3:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = self.run_step()
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.graph_loss = self.run_step()
        self.graph.replay()
        return self.graph_loss.clone()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def about(self):
        return {
            "parameters": self.parameters,
            "device": str(self.device),
            "libtorch": torch.__version__.split("+")[0],
            **({"gpu": torch.cuda.get_device_name()} if self.device.type == "cuda" else {}),
        }

    def memory(self):
        if self.device.type == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_bytes": used, "reserved_bytes": used}

    def measure(self, warm_up, measured):
        losses = [self.step() for _ in range(warm_up)]
        self.synchronize()
        begin, waited = time.perf_counter(), synchronizations()
        losses += [self.step() for _ in range(measured)]
        waits = synchronizations()
        self.synchronize()
        seconds, steps = time.perf_counter() - begin, max(measured, 1)
        return {
            **self.memory(),
            "ms": 1e3 * seconds / steps,
            "synchronizations": None if waits is None else (waits - waited) / steps,
            "losses": [loss.item() for loss in losses],
        }


def print_json(line):
    print(json.dumps(line), flush=True)


class Server:
    """Serves requests. An error leaves no training, so that its memory is free for the next."""

    def __init__(self, impl, model, size, device):
        self.arguments, self.device, self.training = (impl, model, size), device, None

    def serve(self, what, first="", second=""):
        if what == "drop":
            self.training = None
            forget_peak(self.device)
            print_json({})
        elif what == "make":
            self.training = None
            self.training = Training(*self.arguments, first, int(second), self.device)
            print_json(self.training.about())
        else:
            print_json(self.training.measure(int(first), int(second)))


def main():
    impl, model, size, device, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if device == "cuda" and not torch.cuda.is_available():
        print_json({"refused": 'DEVICE is "cuda", but torch.cuda.is_available() is false; expected cpu'})
        return 64
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    server = Server(impl, model, size, place)
    with contextlib.ExitStack() as stack:
        if impl != "pytorch-graph":
            store = dist.FileStore(tempfile.NamedTemporaryFile(prefix="lockstep-bench-").name, 1)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        for line in sys.stdin:
            try:
                server.serve(*line.split())
                continue
            except (torch.OutOfMemoryError, MemoryError) as error:
                reply = {"out_of_memory": str(error).splitlines()[0]}
            except Exception as error:
                text = (str(error).strip() or type(error).__name__).splitlines()[0]
                reply = {"out_of_memory" if "can't allocate memory" in text else "failed": text}
            server.training = None  # after the except clause, whose error refers to the frames that hold its tensors
            print_json(reply)
        server.training = None
    return 0


if __name__ == "__main__":
    sys.exit(main())
