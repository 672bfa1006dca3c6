"""Stage data: how fast examples/04_imagenet trains on JPEG files, and how busy it keeps the GPU, with 0 to 16 workers,
beside torchvision's loader."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time

from machine import find_tool
from results import Failed, Refused
from stage import OutOfTime, Row

HERE = pathlib.Path(__file__).resolve().parent
WORKERS = [0, 2, 4, 8, 16]
EPOCHS = 2  # the first warms up
UNIQUE = 256  # images; more are hard links to them, because to generate one takes longer than to read it


class Images:
    """Generated JPEG files in FOLDER/train/CLASS and FOLDER/val/CLASS, made once per machine."""

    def __init__(self, context):
        self.context, self.folder = context, context.build / "proof-images"
        self.unique, self.width, self.height = (16, 80, 60) if context.tiny else (UNIQUE, 500, 375)

    def make(self):
        if (self.folder / "done").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        program = self.context.program("bench_make_images")
        if not program.exists():
            raise Refused("bench_make_images has not been built: there is no libjpeg-turbo")
        for part, count in (("train", self.unique), ("val", 8)):
            words = [program, self.folder / part, self.width, self.height, count]
            self.context.run(f"images-{part}", words, timeout=180)
        (self.folder / "done").touch()

    def with_count(self, count):
        """Returns a folder with `count` images to train with."""
        folder = self.context.build / f"proof-images-{count}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            for file in (self.folder / "train").glob("*/*.jpg"):
                (part / "train" / file.parent.name).mkdir(parents=True, exist_ok=True)
                for copy in range(count // self.unique):
                    os.link(file, part / "train" / file.parent.name / f"{file.stem}-{copy}.jpg")
            (part / "val").symlink_to(self.folder / "val")
            part.rename(folder)
        return folder


class BusyMeter:
    """Samples nvidia-smi's utilization of the GPU on a thread."""

    def __init__(self, context):
        self.samples, self.process = [], None
        tool = find_tool("nvidia-smi")
        if context.device == "cuda" and tool:
            words = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100", "--id=0"]
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.samples.append((time.monotonic(), int(line)))

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()

    def busy(self, begin, end):
        """Returns the mean share of time in which a kernel was running, or None if it is not known."""
        found = [percent for when, percent in self.samples if begin <= when <= end]
        return round(sum(found) / len(found) / 100, 3) if found else None


def train(context, log, words):
    """Runs a training and returns (its output, seconds per epoch after the first, share of time the GPU was busy)."""
    context.logs.mkdir(parents=True, exist_ok=True)
    meter = BusyMeter(context)
    epochs, lines = [], []
    limit = min(180, context.remaining())
    with open(context.logs / f"{log}.log", "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=context.environment(),
            start_new_session=True,
        )
        timer = threading.Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))  # also workers of a loader
        timer.start()
        try:
            for line in process.stdout:
                file.write(line)
                lines.append(line)
                if re.search(r"epoch \d+: ", line):
                    epochs.append(time.monotonic())
            code = process.wait()
        finally:
            timer.cancel()
            meter.close()
    refused = [line for line in lines if line.startswith("refused: ")]
    if refused:
        raise Refused(refused[0].removeprefix("refused: ").strip())
    if len(epochs) < EPOCHS:
        if context.remaining() < 1:
            raise OutOfTime
        raise Failed(f"{len(epochs)} of {EPOCHS} epochs ended, exit code {code}: {''.join(lines)[-300:]}")
    return lines, (epochs[-1] - epochs[0]) / (EPOCHS - 1), meter.busy(epochs[0], epochs[-1])


def compare(context, images, workers):
    images.make()
    count = 4 * images.unique if context.tiny else 2048 * max(workers, 1)  # so that an epoch takes some seconds
    folder = images.with_count(count)
    arch, batch, side, precision = ("resnet18", 16, 64, "32") if context.tiny else ("resnet50", 64, 224, "bf16-mixed")
    result = {"workers": workers, "arch": arch, "batch": batch, "images": count, "precision": precision}
    words = [context.program("lockstep"), "run", "-n", 1, "--bind", "none", "--", context.program("04_imagenet")]
    words += ["--data", folder, "--arch", arch, "--epochs", EPOCHS, "--batch", batch, "--workers", workers]
    words += ["--image-size", side, "--precision", precision, "--warmup", 0, "--lr", 0.01]
    _, seconds, busy = train(context, f"data-lockstep-{workers}", words)
    result["lockstep"] = {"images_per_second": round(count / seconds, 1), "gpu_busy": busy}
    if context.python:
        words = [context.python, HERE / "pytorch_images.py", folder / "train", arch, batch, workers, EPOCHS]
        words += [context.device, precision, side]
        try:
            lines, seconds, busy = train(context, f"data-pytorch-{workers}", words)
        except Refused as why:
            return {**result, "pytorch": {"loader": f"none: {why}"}}
        result["pytorch"] = {
            "loader": next(line.removeprefix("loader: ").strip() for line in lines if line.startswith("loader: ")),
            "images_per_second": round(count / seconds, 1),
            "gpu_busy": busy,
        }
        rates = [result[name]["images_per_second"] for name in ("lockstep", "pytorch")]
        result["ratio_of_rates"] = round(rates[0] / rates[1], 3)
    return result


def rows(context):
    images = Images(context)
    for workers in [0, 2] if context.tiny else sorted(WORKERS, key=lambda n: abs(n - 8)):
        yield Row(f"{workers} workers", 20 if context.tiny else 60, lambda n=workers: compare(context, images, n))
