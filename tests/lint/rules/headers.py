"""Headers have an include guard, and public headers do not include libtorch's heavy ones (15 s and 1.3 GB per file)."""

from source_tree import Finding, includes

HEAVY = (
    "torch/torch.h",
    "torch/all.h",
    "torch/extension.h",
    "torch/nn.h",
    "torch/data.h",
    "torch/optim.h",
    "torch/script.h",
    "ATen/ATen.h",
    "ATen/Functions.h",
)


def check(tree):
    for path in tree.paths("lockstep", "tests", "examples", "programs", "bench", ends=(".h",)):
        if "#pragma once" not in tree.lines(path):
            yield Finding(path, 1, "no #pragma once")
    for path in tree.paths("lockstep", ends=(".h",)):
        for line, file, _ in includes(tree.text(path)):
            if file in HEAVY:
                yield Finding(
                    path, line, f"a public header includes {file}; use forward declarations or ATen/core/Tensor.h"
                )


SAMPLE = {
    "lockstep/comm/a.h": "// A.\n#pragma once\n#include <ATen/core/Tensor.h>\n#include <torch/torch.h> @flag\n",
    "lockstep/comm/b.h": "// B. @flag\n",
    "lockstep/comm/a.cc": "#include <torch/torch.h>\n",
}
