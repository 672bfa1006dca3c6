#!/usr/bin/env python3
"""Makes NVIDIA's libnccl.so.2 small enough to carry to a machine without a network: GPU code for one architecture only.

Usage: cut_nccl.py LIBRARY OUT SM
LIBRARY: libnccl.so.2 from the wheel nvidia-nccl-cu13 or from a package. OUT: the file to write; `xz -9` then compresses
it to about a twentieth. SM: the GPU's compute capability, such as 90.

The code of other architectures and the debug information become zeros; nothing moves, so addresses stay valid. The
CUDA runtime chooses an entry by its header, which says the architecture, and reads no other entry. Code for linking
(section __nv_relfatbin) is not read at run time.
"""

import pathlib
import struct
import sys

FATBIN_MAGIC = 0xBA55ED50
KIND_ELF = 2  # code for one architecture; 1 is PTX


def sections(data):
    """Yields (name, offset, size) of the sections of a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        sys.exit("cut_nccl: the library is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        yield bytes(data[start : data.index(b"\0", start)]).decode(), offset, size


def clear(data, begin, end):
    data[begin:end] = bytes(end - begin)


def cut_fatbins(data, offset, size, sm):
    """Clears the code that is not for `sm` in a section of fat binaries. Returns how many entries are left."""
    kept, at, end = 0, offset, offset + size
    while at + 16 <= end:
        magic, _, header_size, bytes_after = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN_MAGIC:
            at += 8
            continue
        entry, stop = at + header_size, at + header_size + bytes_after
        if stop > end:
            sys.exit(f"cut_nccl: the fat binary at {at} is longer than its section")
        while entry < stop:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            if entry_header < 32 or entry + entry_header + entry_size > stop:
                sys.exit(f"cut_nccl: the entry at {entry} has an unknown format")
            if kind == KIND_ELF and arch == sm:
                kept += 1
            else:
                clear(data, entry + entry_header, entry + entry_header + entry_size)
            entry += entry_header + entry_size
        at = stop
    return kept


def main():
    if len(sys.argv) != 4 or not sys.argv[3].isdigit():
        sys.exit(__doc__)
    source, out, sm = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    data, kept = bytearray(source.read_bytes()), 0
    for name, offset, size in list(sections(data)):
        if name == ".nv_fatbin":
            kept += cut_fatbins(data, offset, size, sm)
        elif name == "__nv_relfatbin" or name.startswith(".debug_"):
            clear(data, offset, offset + size)
    if kept == 0:
        sys.exit(f"cut_nccl: {source} has no code for sm_{sm}")
    out.write_bytes(data)
    print(f"{out}: code for sm_{sm} in {kept} parts")


main()
