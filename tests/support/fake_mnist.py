"""Writes learnable images in the format of MNIST."""

import struct
from random import Random


def write(folder, count):
    """Writes `count` training images and as many test images: a bright square whose position depends on the label."""
    random = Random(1)
    dark = bytes(value % 64 for value in range(256))
    for part in ("train", "t10k"):
        labels = [random.randrange(10) for _ in range(count)]
        images = bytearray()
        for label in labels:
            image = bytearray(random.randbytes(784).translate(dark))
            for y in range(5):
                start = (label // 5 * 12 + y + 3) * 28 + label % 5 * 5 + 1
                image[start : start + 4] = b"\xff" * 4
            images += image
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + bytes(labels))
