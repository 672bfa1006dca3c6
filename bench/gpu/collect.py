#!/usr/bin/env python3
"""Collects in one file what the GPU proof needs on a machine where nothing can be installed, for `proof.py --carried`.

Usage: collect.py FILE.tar.xz [--torch 2.11.0] [--python-version 3.12] [--sm 90]

It has the headers and static libraries of `scripts/setup.sh --portable`; NVIDIA's NCCL 2.30, which serves several ranks
on one GPU, with the code for one architecture; and torchvision with numpy and Pillow, to compare with. Needs a network,
but no root. The options describe the other machine: its PyTorch, its Python, the GPU's compute capability.
"""

import argparse
import lzma
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

from machine import ROOT

NCCL = "nvidia-nccl-cu13==2.30.3"
# The releases of torchvision belong to those of PyTorch.
TORCHVISION = {"2.11": "0.26.0"}
LARGEST = 45 << 20
# Left out of the wheels: what is not needed to run.
USELESS = [
    "**/tests",
    "**/__pycache__",
    "**/*.pyi",
    "**/include",
    "**/*.a",
    "**/*.lib",
    "numpy/f2py",
    "numpy/_core/lib",
]


def download(folder, python_version, *packages):
    """Downloads wheels for another machine, and unpacks them in `folder`."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python_version, "--dest", folder / "wheels"]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_18_x86_64"):
        options += ["--platform", platform]
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *options, *packages]
    subprocess.run([str(word) for word in words], check=True)
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        shutil.unpack_archive(wheel, folder, "zip")
    shutil.rmtree(folder / "wheels")
    for pattern in USELESS:
        for path in sorted(folder.glob(pattern), reverse=True):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def collect(folder, args):
    subprocess.run([ROOT / "scripts/setup.sh", "--portable", folder / "deps"], check=True)
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        download(work, args.python_version, NCCL)
        subprocess.run(
            [sys.executable, ROOT / "scripts/cut_nccl.py", work / "nvidia/nccl/lib/libnccl.so.2",
             folder / "libnccl.so.2", args.sm],
            check=True,
        )  # fmt: skip
        shutil.copy(next(work.rglob("License.txt")), folder / "NCCL-LICENSE.txt")
    version = TORCHVISION[".".join(args.torch.split(".")[:2])]
    download(folder / "python", args.python_version, f"torchvision=={version}", "numpy", "pillow")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--torch", default="2.11.0")
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--sm", default="90")
    args = parser.parse_args()
    if ".".join(args.torch.split(".")[:2]) not in TORCHVISION:
        parser.error(f"--torch {args.torch}: expected {', '.join(TORCHVISION)}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        collect(folder, args)
        with lzma.open(args.file, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            for part in sorted(folder.iterdir()):
                archive.add(part, part.name)
    size = args.file.stat().st_size
    print(f"{args.file}: {size / (1 << 20):.1f} MiB")
    if size > LARGEST:
        sys.exit(f"collect.py: expected at most {LARGEST >> 20} MiB")


main()
