"""Trains a ResNet of pytorch_step.py on a folder of JPEG files, as examples/04_imagenet does. Started by proof.py.

Usage: pytorch_images.py FOLDER ARCH BATCH WORKERS EPOCHS DEVICE PRECISION SIDE. Prints the loader in its first line,
and a line after each epoch; or "refused: " and the reason.
"""

import pathlib
import sys

import torch
from pytorch_step import AUTOCAST, Basic, Bottleneck, ResNet
from torch.nn import functional

try:
    from torchvision import datasets, transforms
except ImportError:
    datasets = None
try:
    from PIL import Image
except ImportError:
    Image = None


class PillowFolder(torch.utils.data.Dataset):
    """Random crops and flips by Pillow alone, where there is no torchvision."""

    def __init__(self, folder, side):
        self.side = side
        classes = sorted(path for path in pathlib.Path(folder).iterdir() if path.is_dir())
        self.files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.glob("*.jpg"))]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file, label = self.files[index]
        with Image.open(file) as image:
            width, height = image.size
            part = min(width, height) * float(torch.empty(1).uniform_(0.5, 1))
            left, top = float(torch.rand(1)) * (width - part), float(torch.rand(1)) * (height - part)
            crop = image.convert("RGB").resize(
                (self.side, self.side), Image.BILINEAR, (left, top, left + part, top + part)
            )
            pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8).view(self.side, self.side, 3)
        if torch.rand(1) < 0.5:
            pixels = pixels.flip(1)
        return (pixels.permute(2, 0, 1).float() / 255 - 0.45) / 0.225, label


def open_folder(folder, side):
    """Returns the loader's name and the dataset."""
    if Image is None:
        sys.exit("refused: there is neither torchvision nor Pillow to compare with")
    if datasets is None:
        return "Pillow in torch's DataLoader", PillowFolder(folder, side)
    steps = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return "torchvision", datasets.ImageFolder(folder, transforms.Compose(steps))


def main():
    folder, arch, batch, workers, epochs, device, precision, side = sys.argv[1:]
    name, dataset = open_folder(folder, int(side))
    print(f"loader: {name}", flush=True)
    place = torch.device(device)
    torch.manual_seed(1)
    net = ResNet(Basic, [2, 2, 2, 2], 1, 4) if arch == "resnet18" else ResNet(Bottleneck, [3, 4, 6, 3], 4, 4)
    net = net.to(place, memory_format=torch.channels_last)
    if place.type == "cuda":
        torch.backends.cudnn.benchmark = True
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=int(batch),
        shuffle=True,
        drop_last=True,
        num_workers=int(workers),
        persistent_workers=int(workers) > 0,
        pin_memory=place.type == "cuda",
    )
    dtype = AUTOCAST.get(precision)
    for epoch in range(int(epochs)):
        for data, target in loader:
            data = data.to(place, non_blocking=True, memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast(place.type, dtype, enabled=dtype is not None):
                loss = functional.cross_entropy(net(data), target.to(place, non_blocking=True))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)


main()
