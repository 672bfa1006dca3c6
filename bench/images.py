#!/usr/bin/env python3
"""Compares the JPEG throughput of Lockstep's loader with that of torchvision's transforms in torch's DataLoader.

Usage: images.py --bin DIR --python PYTHON [--folder DIR] [--width W --height H] [--workers N,...] [--seconds S]

Creates images unless --folder is given, measures both in turns, and prints a line of JSON for each case. PYTHON has
torch and torchvision (pip install torchvision). Values are images per second of wall time, which a training
loop sees; with 0 workers, values named "core" are images per second of CPU time, which depend less on other load.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time


def run_torchvision(folder, kind, workers, seconds):
    """Does what bench_images does with torchvision, with the transforms of its reference training."""
    import torch
    from torchvision import datasets, transforms

    torch.set_num_threads(1)
    normalize = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crops = (
        [transforms.Resize(256), transforms.CenterCrop(224)]
        if kind == "validation"
        else [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    )
    dataset = datasets.ImageFolder(folder, transforms.Compose(crops + normalize))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=64, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    count, begin = 0, None
    while begin is None or time.perf_counter() - begin < seconds:
        for data, _ in loader:
            if begin is None:
                begin, cpu = time.perf_counter(), time.process_time()  # the first batch warms up
            else:
                count += len(data)
                if time.perf_counter() - begin >= seconds:
                    break
    elapsed, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    print(json.dumps({"images": count, "seconds": elapsed, "cpu_seconds": cpu_seconds}))


def measure(words):
    """Runs a command and returns images per second of wall time and of CPU time."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: code {done.returncode}\n{done.stderr}")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return found["images"] / found["seconds"], found["images"] / found["cpu_seconds"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder")
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--height", type=int, default=375)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--do", nargs=3, metavar=("FOLDER", "KIND", "WORKERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.do:
        folder, kind, workers = args.do
        run_torchvision(folder, kind, int(workers), args.seconds)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or made
        if not args.folder:
            words = [f"{args.bin}/bench_make_images", folder, args.width, args.height, args.count]
            subprocess.run([str(word) for word in words], check=True, timeout=600)
        for _ in range(args.rounds):
            for workers in args.workers.split(","):
                for kind in ("train", "validation", "whole", "bytes"):
                    line = {"kind": kind, "workers": int(workers)}
                    commands = {"lockstep": [f"{args.bin}/bench_images", folder, kind, workers, str(args.seconds)]}
                    if kind in ("train", "validation"):
                        python = [args.python, __file__, "--seconds", str(args.seconds), "--do"]
                        commands["torchvision"] = [*python, folder, kind, workers]
                    for name, words in commands.items():
                        by_clock, by_core = measure(words)
                        line[name] = round(by_clock, 1)
                        if workers == "0":
                            line[name + "_core"] = round(by_core, 1)
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
