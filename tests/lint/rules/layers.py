"""Includes go only downwards: a module includes what its lockstep_module() in the top CMakeLists.txt lists."""

import re

from source_tree import Finding, includes

BUILD_FILE = "CMakeLists.txt"
# The program `lockstep` links only these modules, so that it starts in 10 ms.
WITHOUT_TORCH = ("base", "job", "launch")
TORCH = ("torch/", "ATen/", "c10/")
# The file that chooses a transport. No other file may include the transports, which are PRIVATE_DEPS of its module.
CHOOSER = "lockstep/comm/world.cc"
KEYWORDS = ("TORCH", "DEPS", "PRIVATE_DEPS", "LEAVES", "LINK", "SOURCES")


class Module:
    def __init__(self, words):
        self.lists = {"": [], **{keyword: [] for keyword in KEYWORDS}}
        key = ""
        for word in words:
            if word in KEYWORDS:
                key = word
            else:
                self.lists[key].append(word)
        self.folder = self.lists[""][0]


def modules_of(tree):
    """Returns folder -> Module, in the order in which they are declared."""
    text = re.sub(r"#.*", "", tree.text(BUILD_FILE))
    found = {}
    for match in re.finditer(r"\blockstep_module\(([^)]*)\)", text):
        module = Module(match.group(1).split())
        found[module.folder] = module
    return found


def reachable(modules, folder):
    """Returns the module itself and all modules on which it depends through DEPS."""
    seen, todo = {folder}, [folder]
    while todo:
        for dep in modules[todo.pop()].lists["DEPS"]:
            if dep in modules and dep not in seen:
                seen.add(dep)
                todo.append(dep)
    return seen


def folder_of(path):
    """Returns 'comm/tcp' for 'lockstep/comm/tcp/tcp.h'."""
    return "/".join(path.split("/")[1:-1])


def without_torch(folder):
    return folder.split("/")[0] in WITHOUT_TORCH


def check(tree):
    modules = modules_of(tree)
    yield from check_order(modules)
    for path in tree.cpp("lockstep", "programs", "examples", "bench"):
        if path.count("/") > 1 and path.startswith("lockstep/"):
            yield from check_module(tree, path, modules)
        else:
            yield from check_program(tree, path, modules)


def check_order(modules):
    seen = set()
    for folder, module in modules.items():
        for dep in module.lists["DEPS"] + module.lists["PRIVATE_DEPS"]:
            if dep not in seen:
                yield Finding(BUILD_FILE, 1, f"{folder} depends on {dep}, which is not declared before it")
        seen.add(folder)


def check_module(tree, path, modules):
    folder = folder_of(path)
    if folder not in modules:
        yield Finding(path, 1, f"{BUILD_FILE} has no lockstep_module({folder} ...)")
        return
    module = modules[folder]
    allowed = reachable(modules, folder)
    leaves = ["lockstep/" + header for header in module.lists["LEAVES"]]
    private = module.lists["PRIVATE_DEPS"]
    for line, file, quoted in includes(tree.text(path)):
        if without_torch(folder) and file.startswith(TORCH):
            yield Finding(path, line, f"{folder} must not need libtorch, but includes {file}")
        if not file.startswith("lockstep/"):
            if quoted:
                yield Finding(path, line, f'"{file}": quotes are for "lockstep/MODULE/FILE.h"')
            continue
        target = folder_of(file)
        if target in private and path == CHOOSER:
            continue
        if target in private and not target.endswith(("/gpu",)):
            yield Finding(path, line, f"only {CHOOSER} may include {file}")
        elif target not in allowed and target not in private and file not in leaves:
            deps = ", ".join(module.lists["DEPS"]) or "nothing"
            yield Finding(path, line, f"{folder} depends on {deps}; it may not include {file}")


def check_program(tree, path, modules):
    transports = modules["comm"].lists["PRIVATE_DEPS"] if "comm" in modules else []
    for line, file, _ in includes(tree.text(path)):
        if not file.startswith("lockstep/"):
            if path == "programs/lockstep.cc" and file.startswith(TORCH):
                yield Finding(path, line, f"the program lockstep must not need libtorch, but includes {file}")
            continue
        if folder_of(file) in transports:
            yield Finding(path, line, f"only {CHOOSER} may include {file}")
        elif path == "programs/lockstep.cc" and not without_torch(folder_of(file)):
            yield Finding(path, line, f"the program lockstep is {', '.join(WITHOUT_TORCH)}, but includes {file}")


SAMPLE = {
    BUILD_FILE: "lockstep_module(base LINK x)\nlockstep_module(job DEPS base)\n"
    "lockstep_module(comm/tcp TORCH DEPS job)\n"
    "lockstep_module(comm TORCH\n  DEPS job  # and its own\n  PRIVATE_DEPS comm/tcp)\n"
    "lockstep_module(ddp TORCH DEPS comm)\nlockstep_module(optim TORCH DEPS comm LEAVES ddp/leaf.h)\n"
    "lockstep_module(train TORCH DEPS optim ddp)\n",
    "lockstep/base/a.cc": '#include "lockstep/base/a.h"\n#include <vector>\n#include "lockstep/job/store.h" @flag\n',
    "lockstep/job/b.h": '#include <ATen/core/Tensor.h> @flag\n#include "store.h" @flag\n'
    "#include <lockstep/comm/group.h> @flag\n#include <lockstep/base/a.h>\n",
    "lockstep/comm/world.cc": '#include "lockstep/comm/tcp/tcp.h"\n#include "lockstep/ddp/ddp.h" @flag\n',
    "lockstep/comm/init.cc": '#include "lockstep/comm/tcp/tcp.h" @flag\n#include "lockstep/base/a.h"\n',
    "lockstep/comm/tcp/tcp.cc": '#include "lockstep/base/a.h"\n#include "lockstep/comm/group.h" @flag\n',
    "lockstep/optim/sgd.cc": '#include "lockstep/ddp/leaf.h"\n#include "lockstep/ddp/ddp.h" @flag\n',
    "lockstep/train/t.cc": '#include "lockstep/ddp/ddp.h"\n#include "lockstep/comm/tcp/tcp.h" @flag\n',
    "lockstep/attic/x.h": "#pragma once @flag\n",
    "lockstep/lockstep.h": '#include "lockstep/train/t.h"\n#include "lockstep/comm/tcp/tcp.h" @flag\n',
    "programs/lockstep.cc": '#include "lockstep/job/store.h"\n#include "lockstep/comm/init.h" @flag\n',
    "programs/probe.cc": '#include "lockstep/comm/init.h"\n',
    "examples/01/main.cc": "#include <lockstep/lockstep.h>\n#include <lockstep/comm/tcp/tcp.h> @flag\n",
}
