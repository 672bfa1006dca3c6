"""read_events.py FOLDER: what TensorBoard makes of the event files that unit_train_samples wrote there. Runs in TensorBoard's environment."""

import io
import math
import struct
import sys

from PIL import Image
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util


def check(got, want, what):
    if got != want:
        sys.exit(f"{what}: got {got!r}, want {want!r}")


def rounded(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def main(folder):
    seen = event_accumulator.EventAccumulator(folder, size_guidance={name: 0 for name in event_accumulator.DEFAULT_SIZE_GUIDANCE})
    seen.Reload()
    tags = seen.Tags()
    check(sorted(tags["scalars"]), sorted(["train/loss", "learning rate", "odd", 'a,"b"', "bad \ufffd utf-8", "tiny", "fc.weight/not_finite"]), "scalars")
    check([(e.step, e.value) for e in seen.Scalars("train/loss")], [(s, 10.0 - s) for s in range(6)] + [(s, 100.0 + s) for s in range(6, 10)], "train/loss")
    check([e.value for e in seen.Scalars("learning rate")], [rounded(0.1)] * 4, "learning rate")
    check(seen.Scalars('a,"b"')[0].value, math.inf, "an infinity")
    check(math.isnan(seen.Scalars("odd")[0].value), True, "a NaN")
    check(seen.Scalars("fc.weight/not_finite")[0].value, 1.0, "what is not finite in a histogram")
    check(abs(seen.Scalars("train/loss")[0].wall_time - __import__("time").time()) < 300, True, "the time")

    check(tags["histograms"], ["fc.weight"], "histograms")
    first, second = (e.histogram_value for e in seen.Histograms("fc.weight"))
    check((first.num, rounded(first.min), rounded(first.max), sum(first.bucket), len(first.bucket)), (1000, -5, rounded(4.99), 1000, 64), "a histogram")
    check((second.num, second.min, second.max, list(second.bucket)), (3, 2, 2, [3]), "one of equal numbers")

    check(tags["tensors"], ["sample"], "texts")
    text = tensor_util.make_ndarray(seen.Tensors("sample")[0].tensor_proto).item()
    check(text.decode(), "first line\nsecond: \u2713 \ufffd <b>", "the text")
    check(seen.SummaryMetadata("sample").plugin_data.plugin_name, "text", "its plugin")

    check(sorted(tags["images"]), ["grey", "input"], "images")
    image = Image.open(io.BytesIO(seen.Images("input")[0].encoded_image_string))
    check((image.size, image.mode, list(image.tobytes())), ((3, 2), "RGB", [10 * i for i in range(18)]), "the image")
    check(list(Image.open(io.BytesIO(seen.Images("grey")[0].encoded_image_string)).tobytes()), [0, 255], "the grey one")


main(sys.argv[1])
