#!/usr/bin/env python3
"""Installs a wheel of `make wheels` beside each pair of CPython and torch and trains on two ranks.

Usage: wheel_pairs.py --wheel FILE [--keep FOLDER] [PYTHON:TORCH ...], for example 3.13:2.15

The default is every pair of an interpreter on this machine (pyenv, /usr/bin) and a torch for which the wheel has an
extension. Each installation, of about 6 GB, is removed after its pair, unless --keep names where they stay. The exit
code is 1 if a pair failed.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

TRAIN = """\
import sys, torch, lockstep
world = lockstep.init(transport=sys.argv[1])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
ddp = lockstep.DistributedDataParallel(net, world)
make = lockstep.optim.AdamW if sys.argv[2] == "fused" else torch.optim.AdamW
optimizer = make(ddp, lr=0.01) if sys.argv[2] == "fused" else make(net.parameters(), lr=0.01)
for step in range(5):
    x = torch.arange(64.0).view(8, 8) / (1 + step + world.rank)
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
print("trained", f"{sum(p.double().sum() for p in net.parameters()).item():.6f}")
"""
BACKEND = """\
import torch, torch.distributed as dist
dist.init_process_group("lockstep")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
net(torch.ones(3, 8) * (1 + dist.get_rank())).sum().backward()
print("averaged", net.module.weight.grad.sum().item())
dist.destroy_process_group()
"""


def interpreter(version):
    found = sorted(pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    return str(found[-1]) if found else shutil.which(f"/usr/bin/python{version}")


def pairs_of(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for minor, tag in re.findall(r"_torch_2_(\d+)/_C\.cpython-3(\d+)-", "\n".join(names)):
        if interpreter(f"3.{tag}"):
            yield f"3.{tag}", f"2.{minor}"


class Environment:
    def __init__(self, folder, python, torch, wheel):
        self.bin = folder / "bin"
        subprocess.run([interpreter(python), "-m", "venv", folder], check=True)
        self.run("pip", "install", "-q", "--no-cache-dir", "numpy", f"torch=={torch}.*", wheel)

    def run(self, program, *words, **options):
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": os.environ["HOME"], "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        done = subprocess.run(
            [self.bin / program, *map(str, words)],
            env={**kept, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            **options,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {words}: exit code {done.returncode}\n{done.stdout[-3000:]}")
        return done.stdout

    def results_of(self, word, text, *arguments):
        """What two ranks print after `word`; both must print the same."""
        said = self.run("lockstep", "run", "-n", 2, "--bind", "none", "--", self.bin / "python", "-c", text, *arguments)
        found = re.findall(rf"{word} (\S+)", said)
        if len(found) != 2 or len(set(found)) != 1:
            raise RuntimeError(said[-3000:])
        return found[0]


def test_pair(folder, python, torch, wheel):
    environment = Environment(folder, python, torch, wheel)
    version = environment.run("python", "-c", "import torch; print(torch.__version__)").strip()
    sums = {
        environment.results_of("trained", TRAIN, transport, optimizer)
        for transport in ("shm", "tcp")
        for optimizer in ("torch", "fused")
    }
    if len({round(float(value), 4) for value in sums}) != 1:
        raise RuntimeError(f"weights differ between transports and optimizers: {sums}")
    environment.results_of("averaged", BACKEND)
    return f"torch {version}, sum of weights {sorted(sums)[0]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", type=pathlib.Path, required=True)
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("pairs", nargs="*")
    args = parser.parse_args()
    pairs = [tuple(pair.split(":")) for pair in args.pairs] or sorted(pairs_of(args.wheel), key=lambda pair: pair[1])
    failed = 0
    for python, torch in pairs:
        work = args.keep or pathlib.Path(tempfile.mkdtemp(prefix="lockstep-wheel-"))
        try:
            said = test_pair(work / f"{python}-{torch}", python, torch, args.wheel.resolve())
            print(f"ok: CPython {python}, {said}", flush=True)
        except (RuntimeError, subprocess.SubprocessError) as error:
            failed += 1
            print(f"FAILED: CPython {python}, torch {torch}: {error}", flush=True)
        if not args.keep:
            shutil.rmtree(work)
    sys.exit(failed > 0)


main()
