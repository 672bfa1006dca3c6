"""A rank of bench/slow_networks.py: trains a small model by one of METHODS, and writes what it has measured.

argv: the case as JSON: model, method, seed, steps, goal (the loss at which it ends, after least_steps), batch,
learning_rate, every, evaluate_every, data.
"""

import gzip
import json
import pathlib
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import lockstep

BLOCK = 64  # characters of a sequence
OUTER = {
    "average": None,
    "diloco": lockstep.DiLoCo(),
    "diloco bfloat16": lockstep.DiLoCo(payload="bfloat16"),
    "diloco int8": lockstep.DiLoCo(payload="int8"),
    "diloco int4": lockstep.DiLoCo(payload="int4"),
    "sparseloco": lockstep.SparseLoCo(),
}
TORCHFT_PORT = 29510  # of its lighthouse; its managers listen on those that follow
METHODS = ["alone", "ddp", "ddp bfloat16", "ddp powersgd", "powersgd", "int8", *OUTER]


class Gpt(nn.Module):
    """`width` numbers for each of BLOCK characters; 12 width^2 parameters in each of `depth` blocks."""

    def __init__(self, symbols, width, depth):
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)

    def forward(self, x):
        h = self.symbols(x) + self.places.weight
        return self.head(self.norm(self.blocks(h, mask=self.mask, is_causal=True)))


class Text:
    """Windows of a text; the last tenth is for validation."""

    def __init__(self, folder, width=128, depth=4):
        text = (folder / "tinyshakespeare.txt").read_text()
        symbols = sorted(set(text))
        numbers = {symbol: i for i, symbol in enumerate(symbols)}
        ids = torch.tensor([numbers[symbol] for symbol in text])
        self.train, self.valid = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
        self.make_model = lambda: Gpt(len(symbols), width, depth)

    @staticmethod
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @staticmethod
    def windows(ids, starts):
        return torch.stack([ids[s : s + BLOCK + 1] for s in starts.tolist()])

    def batch(self, count, generator):
        return self.windows(self.train, torch.randint(len(self.train) - BLOCK - 1, (count,), generator=generator))

    def validation(self):
        return self.windows(self.valid, torch.linspace(0, len(self.valid) - BLOCK - 2, 256).long()).split(64)


class Digits:
    """MNIST's test images: 9,000 to train with and 1,000 to validate."""

    def __init__(self, folder):
        def read(name, header):
            with gzip.open(folder / "mnist" / f"{name}.gz") as file:
                return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

        labels = read("t10k-labels-idx1-ubyte", 8).long()
        images = read("t10k-images-idx3-ubyte", struct.calcsize(">4i")).view(-1, 1, 28, 28).float() / 255
        self.pairs, self.valid = (images[:9000], labels[:9000]), (images[9000:], labels[9000:])

    @staticmethod
    def make_model():
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(1568, 640), nn.ReLU(), nn.Linear(640, 10),
        )  # fmt: skip

    @staticmethod
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def batch(self, count, generator):
        chosen = torch.randint(len(self.pairs[0]), (count,), generator=generator)
        return self.pairs[0][chosen], self.pairs[1][chosen]

    def validation(self):
        return [self.valid]


def prepare(model, method, every, world):
    """Returns the model to call, and a function that calls another with the weights to evaluate."""
    if method in ("alone", "torchft diloco"):
        return model, lambda body: body()
    if method.startswith("ddp"):
        # PowerSGD over gloo dies with two buckets: their callbacks start operations in another order on each rank.
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100 if method == "ddp powersgd" else None)
        if method == "ddp bfloat16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if method == "ddp powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp, lambda body: body()
    if method in ("powersgd", "int8"):
        hook = lockstep.PowerSGD(4) if method == "powersgd" else lockstep.Int8()
        model.lockstep_ddp = [lockstep.DistributedDataParallel(model, world, hook=hook)]
        return model, lambda body: body()
    outer = OUTER[method]
    ddp = lockstep.DistributedDataParallel(model, world, average_hosts_every=every, outer=outer)
    model.lockstep_ddp = [ddp]  # kept; a list is no module
    return model, ddp.with_global_copy if outer else lambda body: body()


def start_torchft(model, optimizer, every, rate):
    """Lets torchft's DiLoCo follow the optimizer, on one rank per host, with the outer rate of ours. Its replicas meet
    at the first one's lighthouse. Returns what must be kept."""
    import os
    import socket
    from datetime import timedelta

    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to_first:
        to_first.connect((first, TORCHFT_PORT))  # sends nothing
        own = to_first.getsockname()[0]
    lighthouse = LighthouseServer(f"{first}:{TORCHFT_PORT}", min_replicas=hosts) if rank == 0 else None
    store = dist.TCPStore(own, 0, is_master=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=hosts,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=str(rank),
        store_addr=own,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{first}:{TORCHFT_PORT}",
        port=TORCHFT_PORT + 1 + rank,
        hostname=own,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same parameters
    )
    outer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], optimizer, outer, sync_every=every).__enter__(), manager, store, lighthouse


def measure_rounds(case):
    """The seconds of rounds of a model with `parameters` parameters, of which each has been trained by one step."""
    world = lockstep.init()
    model = nn.Linear(1000, case["parameters"] // 1000, bias=False)
    ddp = lockstep.DistributedDataParallel(
        model, world, average_hosts_every=1 << 30, outer=OUTER[case["method"]], compare_replicas_every=0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    for number in range(case["rounds"] + 1):
        optimizer.zero_grad()
        model(torch.randn(2, 1000)).square().mean().backward()
        optimizer.step()
        world.barrier()
        if number == 1 and world.rank == 0:  # the first round is not measured
            print("ready", flush=True)
            sys.stdin.readline()
        world.barrier()
        begin = time.perf_counter()
        ddp.average_hosts()
        world.barrier()
        if number:
            seconds.append(time.perf_counter() - begin)
    if world.rank == 0:
        print(json.dumps({"parameters": case["parameters"], "seconds": seconds, "points": []}), flush=True)
    del ddp


def main():
    case = json.loads(sys.argv[1])
    if "rounds" in case:
        return measure_rounds(case)
    data = (Text if case["model"] == "gpt" else Digits)(pathlib.Path(case["data"]))
    world = None
    if case["method"].startswith(("ddp", "torchft")):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        world = lockstep.init()
        rank = world.rank
    torch.manual_seed(case["seed"])
    model = data.make_model()
    called, with_weights = prepare(model, case["method"], case["every"], world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case["learning_rate"], weight_decay=0.1)
    torchft = None
    if case["method"] == "torchft diloco":
        torchft = start_torchft(model, optimizer, case["every"], case["outer_rate"])
    generator = torch.Generator().manual_seed(1000 * case["seed"] + rank)
    validation = data.validation()

    def evaluate():
        with torch.no_grad():
            return sum(data.loss(model, batch).item() for batch in validation) / len(validation)

    if rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    (world.barrier if world else dist.barrier)()
    seconds, points = [], []
    for step in range(1, case["steps"] + 1):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = case["learning_rate"] * min(1, step / 50)
        optimizer.zero_grad()
        data.loss(called, data.batch(case["batch"], generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        if step % case["evaluate_every"] == 0:
            points.append([step, with_weights(evaluate)])  # equal on all ranks
            if step >= case["least_steps"] and points[-1][1] <= case["goal"]:
                break
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        print(json.dumps({"parameters": parameters, "seconds": seconds, "points": points}), flush=True)
    if torchft:
        torchft[1].shutdown(wait=False)
    if not world:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
