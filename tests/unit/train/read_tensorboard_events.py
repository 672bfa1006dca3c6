"""Checks what TensorBoard reads from the event files that unit_train_sample_writer wrote to a folder.

Usage: read_tensorboard_events.py FOLDER, in a Python environment with TensorBoard.
"""

import io
import json
import math
import pathlib
import re
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from PIL import Image
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util


def check(got, want, what):
    """Exits with an error unless `got` equals `want`."""
    if got != want:
        sys.exit(f"{what}: got {got!r}, want {want!r}")


def rounded(number):
    """Returns `number` rounded to float32."""
    return struct.unpack("f", struct.pack("f", number))[0]


def check_python_reader(folder):
    """Reads the files with TensorBoard's Python reader."""
    reader = event_accumulator.EventAccumulator(
        folder, size_guidance=dict.fromkeys(event_accumulator.DEFAULT_SIZE_GUIDANCE, 0)
    )
    reader.Reload()
    tags = reader.Tags()
    check(
        sorted(tags["scalars"]),
        sorted(["train/loss", "learning rate", "odd", 'a,"b"', "bad \ufffd utf-8", "tiny", "fc.weight/not_finite"]),
        "scalars",
    )
    check(
        [(e.step, e.value) for e in reader.Scalars("train/loss")],
        [(s, 10.0 - s) for s in range(6)] + [(s, 100.0 + s) for s in range(6, 10)],
        "train/loss",
    )
    check([e.value for e in reader.Scalars("learning rate")], [rounded(0.1)] * 4, "learning rate")
    check(reader.Scalars('a,"b"')[0].value, math.inf, "an infinity")
    check(math.isnan(reader.Scalars("odd")[0].value), True, "a NaN")
    check(reader.Scalars("fc.weight/not_finite")[0].value, 1.0, "number of values in a histogram that are not finite")
    check(abs(reader.Scalars("train/loss")[0].wall_time - time.time()) < 300, True, "the time")

    check(tags["histograms"], ["fc.weight"], "histograms")
    first, second = (e.histogram_value for e in reader.Histograms("fc.weight"))
    check(
        (first.num, rounded(first.min), rounded(first.max), sum(first.bucket), len(first.bucket)),
        (1000, -5, rounded(4.99), 1000, 64),
        "a histogram",
    )
    check((second.num, second.min, second.max, list(second.bucket)), (3, 2, 2, [3]), "a histogram of equal values")

    check(tags["tensors"], ["sample"], "texts")
    text = tensor_util.make_ndarray(reader.Tensors("sample")[0].tensor_proto).item()
    check(text.decode(), "first line\nsecond: \u2713 \ufffd <b>", "the text")
    check(reader.SummaryMetadata("sample").plugin_data.plugin_name, "text", "its plugin")

    check(sorted(tags["images"]), ["grey", "input"], "images")
    image = Image.open(io.BytesIO(reader.Images("input")[0].encoded_image_string))
    check((image.size, image.mode, list(image.tobytes())), ((3, 2), "RGB", [10 * i for i in range(18)]), "the image")
    check(
        list(Image.open(io.BytesIO(reader.Images("grey")[0].encoded_image_string)).tobytes()), [0, 255], "the grey one"
    )


class Server:
    """A TensorBoard server on an unused port."""

    TIMEOUT_S = 60

    def __init__(self, folder):
        program = pathlib.Path(sys.executable).with_name("tensorboard")
        self.end = time.monotonic() + self.TIMEOUT_S
        self.process = subprocess.Popen(
            [program, "--logdir", folder, "--host", "127.0.0.1", "--port", "0", "--reload_interval", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        output = ""
        for line in self.process.stderr:
            output += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
                self.address = f"http://127.0.0.1:{found.group(1)}/data/plugin/"
                return
        sys.exit(f"tensorboard exited: {output}")

    def get(self, path, **arguments):
        """Returns the body of a GET request."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            self.address + path + ("?" + urllib.parse.urlencode(arguments) if arguments else ""), timeout=self.TIMEOUT_S
        ) as response:
            return response.read()

    def get_until(self, good, path, **arguments):
        """Repeats a request until `good` accepts the result or time is up: the server reads files in the background."""
        while True:
            try:
                got = json.loads(self.get(path, **arguments))
                if good(got) or time.monotonic() > self.end:
                    return got
            except urllib.error.HTTPError:
                if time.monotonic() > self.end:
                    raise
            time.sleep(0.2)


def check_server(folder):
    """Reads the files with the TensorBoard server."""
    server = Server(folder)
    try:
        losses = server.get_until(lambda got: len(got) == 10, "scalars/scalars", run=".", tag="train/loss")
        check(
            [(step, value) for _, step, value in losses],
            [(s, 10.0 - s) for s in range(6)] + [(s, 100.0 + s) for s in range(6, 10)],
            "train/loss of the server",
        )
        histograms = server.get_until(lambda got: len(got) == 2, "histograms/histograms", run=".", tag="fc.weight")
        check([step for _, step, _ in histograms], [4, 5], "histograms of the server")
        check(round(sum(count for _, _, count in histograms[0][2])), 1000, "values in a histogram")
        texts = server.get_until(bool, "text/text", run=".", tag="sample")
        check(
            "second: \u2713" in texts[0]["text"] and "&lt;b" in texts[0]["text"],
            True,
            f"the text of the server, {texts}",
        )
        images = server.get_until(bool, "images/images", run=".", tag="input", sample=0)
        check(images[0]["step"], 7, "the image of the server")
        image = Image.open(io.BytesIO(server.get("images/individualImage?" + images[0]["query"])))
        check(image.size, (3, 2), "size of the image")
    finally:
        server.process.terminate()
        server.process.wait(30)


check_python_reader(sys.argv[1])
check_server(sys.argv[1])
