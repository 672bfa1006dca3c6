"""Includes go only downwards: the rooms and levels of the house (CONTRIBUTING.md)."""

from source_tree import Finding, includes

TRANSPORTS = ("comm/self", "comm/shm", "comm/gloo", "comm/mpi", "comm/nccl", "comm/hierarchy")
L3 = ("ddp", "optim", "amp", "data", "nn", "checkpoint")
BELOW_L3 = ("comm", "comm/seam", "comm/arena", "launch", "job", "base")

# What each room may include beside itself.
MAY_INCLUDE = {
    "base": (),
    "job": ("base",),
    "launch": ("job", "base"),
    "comm/arena": ("base",),
    "comm/seam": ("job", "base"),
    "comm/cuda": ("comm/seam", "base"),
    **dict.fromkeys(TRANSPORTS, ("comm/seam", "comm/arena", "job", "base")),
    "comm/hierarchy": ("comm/seam", "comm/arena", "comm/shm", "job", "base"),
    "comm/nccl": ("comm/seam", "comm/cuda", "job", "base"),
    "comm": ("comm/seam", "comm/cuda", "comm/arena", "launch", "job", "base"),
    **dict.fromkeys(L3, BELOW_L3),
    "data/jpeg": ("base",),
    "cuda": ("comm", "base"),  # links CUDA: nobody includes it
    "data": ("data/jpeg",) + BELOW_L3,
    "train/view": ("base",),
    "train": ("train/view",) + L3 + BELOW_L3,
    "": ("train", "train/view") + L3 + BELOW_L3,  # lockstep/lockstep.h
}
# Where rooms of L3 meet.
LEAF_HEADERS = ("lockstep/ddp/gradient_source.h", "lockstep/amp/unscaling.h", "lockstep/checkpoint/stateful.h")
# Where a transport is chosen.
CHOOSER = "lockstep/comm/world.cc"
# The program `lockstep` starts in 10 ms because it is these.
WITHOUT_TORCH = ("base", "job", "launch")
TORCH = ("torch/", "ATen/", "c10/")


def module_of(path):
    """'lockstep/comm/gloo/x.h' -> 'comm/gloo'; None for a folder that is no room."""
    folders = path.split("/")[1:-1]
    room = "/".join(folders)
    return room if room in MAY_INCLUDE else None


def check(tree):
    for path in tree.cpp("lockstep", "programs", "examples", "bench"):
        if path.startswith("lockstep/"):
            yield from check_module(tree, path)
        else:
            yield from check_program(tree, path)


def check_module(tree, path):
    room = module_of(path)
    if room is None:
        yield Finding(path, 1, f"is in no room of the house: {', '.join(sorted(filter(None, MAY_INCLUDE)))}")
        return
    for line, file, quoted in includes(tree.text(path)):
        if room in WITHOUT_TORCH and file.startswith(TORCH):
            yield Finding(path, line, f"{room} must do without libtorch, but includes {file}")
        if not file.startswith("lockstep/"):
            if quoted:
                yield Finding(path, line, f'"{file}": quotes are for "lockstep/ROOM/FILE.h"')
            continue
        target = module_of(file)
        allowed = target == room or target in MAY_INCLUDE[room] or (room in L3 and file in LEAF_HEADERS)
        if path == CHOOSER and target in TRANSPORTS:
            allowed = True
        if not allowed:
            beside = ", ".join(MAY_INCLUDE[room]) or "nothing"
            yield Finding(path, line, f"{room or 'lockstep'} may include {beside}, but not {file}")


def check_program(tree, path):
    alone = path == "programs/lockstep.cc" or path.startswith("programs/lockstep/")
    for line, file, _ in includes(tree.text(path)):
        if file.startswith("lockstep/") and module_of(file) in TRANSPORTS:
            yield Finding(path, line, f"{file} belongs to a transport; only {CHOOSER} includes it")
        elif alone and (
            file.startswith(TORCH) or (file.startswith("lockstep/") and module_of(file) not in WITHOUT_TORCH)
        ):
            yield Finding(path, line, f"the program lockstep is {', '.join(WITHOUT_TORCH)} alone, but includes {file}")


SAMPLE = {
    "lockstep/base/a.cc": '#include "lockstep/base/a.h"\n#include <vector>\n#include "lockstep/job/store.h" @flag\n',
    "lockstep/job/b.h": '#include <ATen/core/Tensor.h> @flag\n#include "store.h" @flag\n#include <lockstep/comm/group.h> @flag\n',
    "lockstep/comm/world.cc": '#include "lockstep/comm/gloo/gloo.h"\n#include "lockstep/ddp/ddp.h" @flag\n',
    "lockstep/comm/init.cc": '#include "lockstep/comm/gloo/gloo.h" @flag\n#include "lockstep/job/store.h"\n',
    "lockstep/comm/gloo/gloo.cc": '#include "lockstep/comm/seam/work.h"\n#include "lockstep/comm/group.h" @flag\n',
    "lockstep/data/loader.h": '#include "lockstep/ddp/gradient_source.h"\n#include "lockstep/ddp/ddp.h" @flag\n',
    "lockstep/train/t.cc": '#include "lockstep/ddp/ddp.h"\n#include "lockstep/comm/gloo/gloo.h" @flag\n',
    "lockstep/attic/x.h": "#pragma once @flag\n",
    "lockstep/lockstep.h": '#include "lockstep/train/report/progress_bar.h"\n#include "lockstep/comm/self/self.h" @flag\n',
    "programs/lockstep.cc": '#include "lockstep/launch/run.h"\n#include "lockstep/comm/init.h" @flag\n',
    "programs/probe.cc": '#include "lockstep/comm/init.h"\n',
    "examples/01/main.cc": "#include <lockstep/lockstep.h>\n#include <lockstep/comm/gloo/gloo.h> @flag\n",
}
