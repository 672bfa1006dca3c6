"""Stage torch: scripts of torch.distributed over the backend "lockstep": DistributedDataParallel, FSDP, checkpoints."""

import json
import os
import pathlib

from results import Failed, Refused
from stage import Row

SCRIPT = pathlib.Path(__file__).resolve().parent / "torch_script.py"


def script(context, mode):
    """One rank on the GPU, because NCCL gives each rank a GPU of its own; two on the CPU."""
    package = context.build / "python"
    if not context.python or not list((package / "lockstep").glob("_C.*")):
        raise Refused("the Python package has not been built: CMake found no Python with torch and its headers")
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    words = [context.program("lockstep"), "run", "-n", 1 if context.device == "cuda" else 2, "--bind", "none"]
    _, text = context.run(
        f"torch-{mode}",
        [*words, context.python, SCRIPT, mode, context.device],
        timeout=120,
        env=context.environment(PYTHONPATH=path),
    )
    answer = json.loads(text[text.index("{") :].splitlines()[0])
    differences = [abs(one - two) for one, two in zip(answer["losses"], answer["alone"], strict=True)]
    if max(differences) > 1e-4 or not answer.get("same", True):
        raise Failed(f"the training differs from that without ranks: {answer}")
    return {"ranks": answer["ranks"], "losses": answer["losses"], "largest_difference": max(differences)}


def rows(context):
    for mode in ("ddp", "fsdp", "checkpoint"):
        yield Row(f"{mode} over the backend lockstep", 40, lambda mode=mode: script(context, mode))
