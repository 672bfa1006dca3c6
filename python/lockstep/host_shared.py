"""Keeps a model's parameters once per host."""

from __future__ import annotations

import mmap
import os
import pathlib
import secrets
from typing import Any

import torch
from torch import nn

from lockstep import _C
from lockstep.errors import SystemError, UsageError
from lockstep.group import Group

__all__ = ["HostShared", "host_shared"]

_ALIGNMENT = mmap.PAGESIZE  # each tensor is a mapping of its own, which a fused optimizer can replace


class HostShared:
    """What host_shared() has done.

    Attributes:
        num_bytes: of the parameters and buffers, once per host.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name = name
        self.num_bytes = num_bytes

    @property
    def copied_bytes(self) -> int:
        """Memory that this rank has for itself because it wrote to it: whole pages."""
        return self._sum("Anonymous:")

    @property
    def mapped_bytes(self) -> int:
        """What this rank still uses of the shared memory, written or not: 0 once a fused optimizer, or other memory,
        has taken the place of all of it."""
        return self._sum("Size:")

    def _sum(self, field: str) -> int:
        kilobytes, inside = 0, False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                first = line.split(maxsplit=1)[0]
                if not first.endswith(":"):
                    inside = self._name in line
                elif inside and first == field:
                    kilobytes += int(line.split()[1])
        return kilobytes * 1024


def host_shared(module: nn.Module, world: Group, file: str | os.PathLike[str] | None = None) -> HostShared:
    """Gives the module's parameters and buffers one memory for all ranks of this host, with the values of the first of
    them, or of a file that this rank reads alone. Each rank sees it as its own: a write makes a copy of that page for
    the rank that writes. A fused optimizer that is made afterwards takes the parameters over as its one copy.

    Args:
        module: on the CPU or, with `file`, on the device "meta", where it needs no memory before. Parameters stay the
            same objects, except those on "meta". Tied parameters stay tied.
        world: the ranks. Collective; all have a module with the same tensors.
        file: safetensors, or the result of torch.save(module.state_dict()), with all names of the module.

    Raises UsageError on all ranks for tensors on GPUs, for modules that differ, and for a file that does not fit.
    """
    host = _same_memory()
    leader = world.all_gather_object(host).index(host)
    slots: list[_Slot] = []
    failure, name, path = "", "", ""
    memory = -1
    try:
        try:
            slots = _slots(module)
            if world.rank == leader:
                name = f"lockstep-shared-{secrets.token_hex(8)}"
                memory = os.memfd_create(name)
                path = f"/proc/{os.getpid()}/fd/{memory}"
                _write(path, slots, module, _read(file) if file is not None else None)
        except Exception as error:  # of any kind that a damaged file causes; all ranks raise it as a UsageError
            failure = str(error) or type(error).__name__
        own = [(slot.names[0], str(slot.dtype), list(slot.shape)) for slot in slots]
        everyone = world.all_gather_object((name, path, own, failure))
        for rank, (_, _, theirs, why) in enumerate(everyone):
            if why:
                raise UsageError(f"host_shared(): rank {rank}: {why}", cause="BAD_FILE")
            if theirs != everyone[0][2]:
                raise UsageError(f"host_shared(): rank {rank} has other parameters or buffers than rank 0")
        name, path = everyone[leader][:2]
        mapped: list[torch.Tensor] = []
        try:
            mapped = _map(path, slots)
        except (OSError, SystemError) as error:
            failure = str(error)
        for rank, why in enumerate(world.all_gather_object(failure)):
            if why:
                raise UsageError(f"host_shared(): rank {rank} cannot map the memory of rank {leader}: {why}")
        for slot, tensor in zip(slots, mapped, strict=True):
            _replace(slot, tensor, module)
    finally:
        if memory >= 0:
            os.close(memory)
    return HostShared(name, _size_of(slots))


def _same_memory() -> str:
    """A text that is equal on ranks that can open each other's memory."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


class _Slot:
    """One tensor, which may have several names."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.names: list[str] = []
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        size = tensor.numel() * tensor.element_size()
        self.padded_size = -(-size // _ALIGNMENT) * _ALIGNMENT


def _slots(module: nn.Module) -> list[_Slot]:
    found: dict[int, _Slot] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if tensor.device.type not in ("cpu", "meta") or tensor.layout != torch.strided:
            raise UsageError(f'"{name}" is on {tensor.device} as {tensor.layout}; expected dense tensors on the CPU')
        found.setdefault(id(tensor), _Slot(tensor)).names.append(name)
    return list(found.values())


def _size_of(slots: list[_Slot]) -> int:
    return sum(slot.padded_size for slot in slots)


def _read(file: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    with open(file, "rb") as opened:
        is_torch = opened.read(4) == b"PK\x03\x04"
    if is_torch:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    from safetensors.torch import load_file

    return load_file(file)


def _write(path: str, slots: list[_Slot], module: nn.Module, values: dict[str, torch.Tensor] | None) -> None:
    if values is not None:
        saved = set(module.state_dict())  # without buffers that are not persistent
        missing = next((s.names[0] for s in slots if saved & set(s.names) and not values.keys() & set(s.names)), None)
        if missing is not None:
            raise UsageError(f'the file has no "{missing}"')
        extra = next((name for name in values if name not in saved), None)
        if extra is not None:
            raise UsageError(f'the file has "{extra}", which the module does not have')
    storage = torch.UntypedStorage.from_file(path, True, max(_size_of(slots), 1))
    offset = 0
    for slot in slots:
        source = next((values[name] for name in slot.names if name in values), slot.tensor) if values else slot.tensor
        if source.is_meta:
            raise UsageError(f'"{slot.names[0]}" is on the device "meta", and there is no file')
        if tuple(source.shape) != slot.shape or source.dtype != slot.dtype:
            raise UsageError(f'"{slot.names[0]}" has another shape or dtype in the file')
        place = torch.empty(0, dtype=slot.dtype).set_(storage, offset // slot.dtype.itemsize, slot.shape)
        place.copy_(source.detach())
        offset += slot.padded_size


def _map(path: str, slots: list[_Slot]) -> list[torch.Tensor]:
    """Private to this process: the kernel copies a page at the first write to it."""
    opened = os.open(path, os.O_RDWR)
    try:
        mapped, offset = [], 0
        for slot in slots:
            if slot.padded_size == 0:
                mapped.append(torch.empty(slot.shape, dtype=slot.dtype))
                continue
            num_bytes = slot.tensor.numel() * slot.tensor.element_size()
            mapped.append(_C.map_private(opened, offset, num_bytes).view(slot.dtype).view(slot.shape))
            offset += slot.padded_size
        return mapped
    finally:
        os.close(opened)


def _replace(slot: _Slot, memory: torch.Tensor, module: nn.Module) -> None:
    if not slot.tensor.is_meta:
        slot.tensor.data = memory
        return
    made: Any = nn.Parameter(memory, slot.tensor.requires_grad) if isinstance(slot.tensor, nn.Parameter) else memory
    for name in slot.names:
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, made)
