"""A file of lockstep/A/B opens the namespace lockstep::A::B, and only declares names of other folders."""

import re

from source_tree import Finding, without_comments_and_strings

# The functions lockstep::launch and lockstep::train own the short names.
NAMES = {"launch": "launcher", "train": "training"}
# Users write these names without that of the folder, as in lockstep::optim::cosine_decay.
INLINE = (
    "checkpoint/safetensors",
    "checkpoint/torch_file",
    "comm/interface",
    "data/datasets",
    "ddp/hooks",
    "ddp/outer",
    "optim/fused",
    "optim/schedules",
    "train/loggers",
    "train/metrics",
    "train/report",
)
BLOCK = re.compile(r"(?m)^namespace ((?:\w+|::|inline )+) \{")
PREPROCESSOR = re.compile(r"(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*")
# What a file may declare for other folders: classes and functions, and a header's own names once more for its module.
DECLARATION = re.compile(
    r"\s*(?:(?:enum )?(?:class|struct) \w+(?: : \w+)?|using \w+::\w+|[\w:<>&* ]+[ &*]\w+\([^;{}]*\));"
)


def namespace_of(folder):
    """Returns 'lockstep::launcher::doctor' for 'launch/doctor', 'lockstep::optim::inline fused' for 'optim/fused'."""
    parts = folder.split("/")
    parts[0] = NAMES.get(parts[0], parts[0])
    if folder in INLINE:
        parts[-1] = "inline " + parts[-1]
    return "::".join(["lockstep", *parts])


def check(tree):
    for path in tree.cpp("lockstep"):
        folder = "/".join(path.split("/")[1:-1])
        if folder:
            yield from check_file(path, without_comments_and_strings(tree.text(path)), namespace_of(folder))


def check_file(path, code, expected):
    if not PREPROCESSOR.sub("", code).strip():
        return  # it only includes other files
    blocks = list(BLOCK.finditer(code))
    opened = [match.group(1) for match in blocks]
    if not any(name == expected or name.startswith(expected + "::") for name in opened):
        yield Finding(path, 1, f"opens {', '.join(opened) or 'no namespace'}; expected namespace {expected}")
        return
    for match in blocks:
        name = match.group(1)
        if name == expected or name.startswith(expected + "::") or not name.startswith("lockstep"):
            continue
        body = code[match.end() : code.find("\n}", match.end())]
        if DECLARATION.sub("", body).strip():
            line = code.count("\n", 0, match.start()) + 1
            yield Finding(path, line, f"only files of its folder define names in {name}; expected {expected}")


SAMPLE = {
    "lockstep/lockstep.h": "namespace lockstep {\nusing comm::Group;\n}\n",
    "lockstep/base/error.h": "#pragma once\n\nnamespace lockstep::base {\nclass Error {};\n}\n",
    "lockstep/base/net/socket.h": "#pragma once @flag\n\nnamespace lockstep::base {\nclass Socket {};\n}\n",
    "lockstep/launch/doctor/doctor.cc": "namespace lockstep::launcher::doctor {\nnamespace {\nint x;\n}\n}\n",
    "lockstep/launch/doctor/facts.cc": "namespace lockstep::launch::doctor { @flag\n}\n",
    "lockstep/optim/fused/update.h": """\
namespace lockstep::comm::inline interface {
class ChunkSink;
enum class Kind : int;
int& count(ChunkSink* sink);
}  // namespace lockstep::comm::inline interface
namespace lockstep::ddp { @flag
class GradientSource {};
}
namespace torch::optim {
struct Options {};
}
namespace lockstep::optim::inline fused {
struct Update {};
}
""",
    "lockstep/optim/schedules/a.h": "// A schedule. @flag\nnamespace lockstep::optim::schedules {\n}\n",
    "lockstep/optim/kernels/body.h": "namespace lockstep::optim::kernels::LOCKSTEP_ISA {\n}\n",
    "lockstep/optim/kernels/clip.h": """\
namespace lockstep::optim::kernels {
void clip();
}
namespace lockstep::optim {
using kernels::clip;
}
""",
    "lockstep/train/trainer.h": "extern int x; @flag\n",
    "lockstep/comm/shm/reduce_avx2.cc": '#define LOCKSTEP_ISA avx2\n#include "lockstep/comm/shm/reduce_kernels.h"\n',
    "tests/unit/base/net/socket_test.cc": "namespace lockstep::base {\n}\n",
}
