#!/usr/bin/env python3
"""Writes failing-job.svg: what a script prints under torchrun and under `lockstep run` while one rank hangs.

Usage: failing_job.py --lockstep PROGRAM --python INTERPRETER
The script is below. Under torchrun it is ended after 60 s, in which it has printed nothing more.
"""

import argparse
import html
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import textwrap

SCRIPT = """\
import time

import torch
import torch.distributed as dist


def evaluate():
    if dist.get_rank() == 2:
        time.sleep(3600)  # waits for a file that never comes
    dist.barrier()


dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
evaluate()
"""
COLUMNS, LINE, WIDTH, TORCHRUN_SECONDS = 62, 17, 520, 60
STYLE = "font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def output_of(command, folder, seconds):
    job = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return job.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        return job.communicate()[0].partition("W1")[0]


def panel(title, lines, x):
    parts = [f'<text x="{x + 14}" y="26" fill="#8b949e">{html.escape(title)}</text>']
    for number, (line, color) in enumerate(lines):
        parts.append(
            f"""<text x="{x + 14}" y="{56 + number * LINE}" fill="{color}" xml:space="preserve">"""
            f"{html.escape(line)}</text>"
        )
    return "\n".join(parts)


def wrapped(text, color):
    return [(line, color) for line in textwrap.wrap(text, COLUMNS, break_long_words=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "train.py").write_text(SCRIPT)
        torchrun = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py"]
        silent = output_of(torchrun, folder, TORCHRUN_SECONDS)
        lockstep = [
            os.path.abspath(options.lockstep),
            "run",
            "-n",
            "3",
            "--hang-timeout",
            "10",
            options.python,
            "train.py",
        ]
        named = output_of(lockstep, folder, 120)
    plain, dim, red = "#e6edf3", "#8b949e", "#ff7b72"
    left = [("$ torchrun --nproc-per-node 3 train.py", plain)]
    left += [(line, plain) for line in silent.splitlines() if line.startswith("step")]
    left += [("", plain), (f"{TORCHRUN_SECONDS} s later: nothing more is printed, nothing has ended", dim)]
    right = [("$ lockstep run -n 3 --hang-timeout 10 python train.py", plain)]
    right += [(line, plain) for line in named.splitlines() if line.startswith("[0] step")]
    fatal = next(line for line in named.splitlines() if line.startswith("FATAL"))
    fatal = re.sub(r"pid=\d+", "pid=4711", re.sub(r"host=\S+", "host=alpha", fatal)).replace(f"{folder}/", "")
    fatal = re.sub(r"runs/[\w.-]+", "runs/train-1", fatal)
    right += [("", plain), *wrapped(fatal, red)]
    height = 76 + LINE * max(len(left), len(right))
    picture = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 12} {height}" role="img" style="{STYLE}">
<title>The same script under torchrun and under lockstep run</title>
<rect width="{WIDTH}" height="{height}" rx="8" fill="#161b22"/>
<rect x="{WIDTH + 12}" width="{WIDTH}" height="{height}" rx="8" fill="#161b22"/>
{panel("torchrun", left, 0)}
{panel("lockstep run", right, WIDTH + 12)}
</svg>
"""
    pathlib.Path(__file__).with_name("failing-job.svg").write_text(picture)
    print(silent, named, sep="\n---\n")


if __name__ == "__main__":
    main()
