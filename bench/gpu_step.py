"""The step of gpu_step.cc in PyTorch: the same models, names, first weights and data, turns and answers. What gpu.py runs.

gpu_step.py IMPL MODEL SIZE PRECISION BATCH DEVICE THREADS
IMPL: pytorch-ddp-loop, pytorch-ddp (torch's default on a GPU, a foreach optimizer), pytorch-ddp-fused, in a DistributedDataParallel of one rank; pytorch: foreach, without one.
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
WAYS = {"pytorch-ddp-loop": {"foreach": False}, "pytorch-ddp": {"foreach": True}, "pytorch-ddp-fused": {"fused": True}, "pytorch": {"foreach": True}}


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
    """examples/03_char_gpt/gpt.h"""

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
        for name, value in net.named_parameters():
            if value.dim() > 1:
                value.normal_(0, 1 / math.sqrt(value.numel() // value.size(0)))
            else:
                value.fill_(0 if "bias" in name else 1)


def make_gpt(tiny, batch):
    shape = {"vocabulary": 101, "block": 16, "width": 32, "layers": 2, "heads": 4} if tiny else {"vocabulary": 50257, "block": 1024, "width": 768, "layers": 12, "heads": 12}
    net = Gpt(**shape)
    set_weights(net)
    torch.manual_seed(2)
    text, following = (torch.randint(shape["vocabulary"], (batch, shape["block"])) for _ in range(2))
    return net, text, following, lambda output, target: functional.nll_loss(output.flatten(0, 1), target.flatten())


def gpt_optimizer(parameters, way):
    return torch.optim.AdamW(parameters, 3e-4, weight_decay=1e-2, **way)


MODELS = {"gpt": (make_gpt, gpt_optimizer)}


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
        self.optimizer = make_optimizer(self.net.parameters(), WAYS[impl])
        self.dtype = AUTOCAST[precision]
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16-mixed")

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

    def take_turn(self, uncounted, counted):
        losses = [self.step() for _ in range(uncounted)]
        self.synchronize()
        begin = time.perf_counter()
        losses += [self.step() for _ in range(counted)]
        self.synchronize()
        seconds = time.perf_counter() - begin
        return {**self.memory(), "ms": 1e3 * seconds / max(counted, 1), "losses": [loss.item() for loss in losses]}


def say(answer):
    print(json.dumps(answer), flush=True)


def main():
    impl, model, size, precision, batch, device, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if device == "cuda" and not torch.cuda.is_available():
        say({"refused": "DEVICE is \"cuda\", but torch.cuda.is_available() is false; allowed here is cpu"})
        return 64
    try:
        training = Training(impl, model, size, precision, int(batch), device)
        say({"parameters": training.parameters, "device": str(training.device), "libtorch": torch.__version__.split("+")[0],
             **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})})
        for line in sys.stdin:
            say(training.take_turn(*map(int, line.split())))
    except (torch.OutOfMemoryError, MemoryError) as error:
        say({"out_of_memory": str(error).splitlines()[0]})
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        say({"out_of_memory": str(error).splitlines()[0]})
    return 0


code = main()
if dist.is_initialized():
    dist.destroy_process_group()
sys.exit(code)
