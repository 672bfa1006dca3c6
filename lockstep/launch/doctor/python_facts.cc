#include "lockstep/launch/doctor/python_facts.h"

namespace lockstep::launcher::doctor {

const char* const kPythonFacts = R"PY(
import sys
if sys.path and not sys.path[0]:
    del sys.path[0]  # the current folder, whose json.py or torch.py would run
import ast, json, os

facts = {"python": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix}
active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
if active and os.path.realpath(active) != os.path.realpath(sys.prefix):
    facts["environment"] = active


def imports(node, optional=False):
    """Yields the names of modules that are imported, and whether they may be missing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, optional
        elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
            yield child.module, optional
        else:
            yield from imports(child, optional or isinstance(child, ast.Try))


def imported_packages(script):
    folder = os.path.dirname(os.path.abspath(script))
    sys.path.insert(0, folder)
    names, files = {}, [script]
    for path in files:  # which grows
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read(1 << 20))
        except (OSError, SyntaxError, ValueError):
            continue
        for module, optional in imports(tree):
            place = os.path.join(folder, *module.split("."))
            own = [one for one in (place + ".py", os.path.join(place, "__init__.py")) if os.path.isfile(one)]
            top = module.partition(".")[0]
            if own or os.path.isdir(os.path.join(folder, top)):
                files += [one for one in own if one not in files and len(files) < 500]
            else:
                names[top] = names.get(top, True) and optional
    for name in getattr(sys, "stdlib_module_names", sys.builtin_module_names):
        names.pop(name, None)
    return names


def versions_of(names):
    import importlib.metadata
    import importlib.util

    distributions = getattr(importlib.metadata, "packages_distributions", dict)() if names else {}
    found = {}
    for name, optional in sorted(names.items()):
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            spec = None
        if spec is None or (spec.origin is None and name not in distributions):  # a folder of that name is none
            if not optional:
                found[name] = ""
            continue
        try:
            versions = sorted({importlib.metadata.version(one) for one in distributions.get(name, [name])})
        except Exception:
            versions = []
        found[name] = " ".join(versions) or "?"
    return found


def why_no_cuda(torch):
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES is " + repr(os.environ["CUDA_VISIBLE_DEVICES"])
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).splitlines()[0]
    return "there is no GPU"


try:
    if len(sys.argv) > 1:
        facts["packages"] = versions_of(imported_packages(sys.argv[1]))
except Exception as error:
    facts["packages_error"] = repr(error)
try:
    import torch

    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    facts["no_cuda"] = why_no_cuda(torch)
    try:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        pass
except Exception as error:
    facts["error"] = type(error).__name__ + ": " + str(error)
print(json.dumps(facts))
)PY";

}  // namespace lockstep::launcher::doctor
