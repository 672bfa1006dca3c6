"""The examples in Python beside those in C++: from the same first weights, with the same batches, the same losses."""

import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/python"
LOCKSTEP = pathlib.Path(os.environ["LOCKSTEP_PROGRAM"])
STEPS = 100

sys.path.insert(0, str(EXAMPLES))


def write_digits(folder, count=1000):
    """Files in the format of MNIST: blurred squares whose place depends on the digit."""
    generator = torch.Generator().manual_seed(1)
    digits = torch.randint(0, 10, (count,), generator=generator, dtype=torch.uint8)
    images = torch.randint(0, 60, (count, 28, 28), generator=generator, dtype=torch.uint8)
    for image, digit in zip(images, digits.tolist(), strict=True):
        image[2 * digit : 2 * digit + 8, 20 - 2 * digit : 28 - 2 * digit] += 150
    head = (0x00000803).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
    (folder / "t10k-images-idx3-ubyte").write_bytes(head + images.numpy().tobytes())
    head = (0x00000801).to_bytes(4, "big") + count.to_bytes(4, "big")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(head + digits.numpy().tobytes())


def losses_of(folder, ranks, command, options):
    log = folder / "losses"
    words = [LOCKSTEP, "run", "-n", ranks, "--bind", "none", *command, *options, "--loss-log", log]
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_LOG": "quiet"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(text) for text in log.read_text().split()][:STEPS], done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_mnist(tmp_path, ranks):
    import mnist

    write_digits(tmp_path)
    torch.manual_seed(5)
    save_file(mnist.Net().state_dict(), tmp_path / "first.safetensors")
    options = ["--data", tmp_path, "--weights", "first.safetensors", "--batch-size", 16, "--epochs", 2]
    expected, _ = losses_of(tmp_path, ranks, [LOCKSTEP.parent / "02_mnist"], options)
    found, said = losses_of(tmp_path, ranks, [sys.executable, EXAMPLES / "mnist.py"], options)
    assert len(found) == len(expected) == STEPS and found[-1] < found[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
    assert "epoch 2: validation loss" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_char_gpt(tmp_path, ranks):
    import char_gpt

    text = "".join(f"{number} times {number} is {number * number}. " for number in range(1500))
    (tmp_path / "text").write_text(text)
    torch.manual_seed(5)
    save_file(char_gpt.Gpt(len(set(text)), 32).state_dict(), tmp_path / "first.safetensors")
    options = ["--corpus", "text", "--weights", "first.safetensors", "--steps", STEPS, "--block", 32, "--batch-size", 8]
    expected, _ = losses_of(tmp_path, ranks, [LOCKSTEP.parent / "03_char_gpt"], [*options, "--sample", 0])
    found, said = losses_of(tmp_path, ranks, [sys.executable, EXAMPLES / "char_gpt.py"], [*options, "--sample", 20])
    assert len(found) == len(expected) == STEPS and found[-1] < math.log(len(set(text)))
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
    assert "validation loss after" in said
