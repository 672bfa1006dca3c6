"""Records the steps of a program with torch's DistributedDataParallel for `lockstep plan`, as lockstep/ddp/step_profile.h
does for Lockstep's. Imported only under `lockstep plan`, while torch is imported."""

import atexit
import functools
import json
import os
import time

_WARM_UP_STEPS = 5
_BEFORE_EXIT_S = 0.5  # peers may still need this process for the end of the last reduction
_recorder = None


def keep_files(serialization):
    """torch.save() writes nothing: the program only shows how long its steps take."""

    @functools.wraps(serialization.save)
    def save(obj, f, *arguments, **options):
        if not isinstance(f, (str, os.PathLike)):
            original(obj, f, *arguments, **options)

    original, serialization.save = serialization.save, save


def wrap(module):
    """Lets each DistributedDataParallel of the module torch.nn.parallel.distributed record its steps."""
    global _recorder
    steps, folder = os.environ["LOCKSTEP_PROFILE"].split(":", 1)
    _recorder = _Recorder(int(steps), folder)
    original = module.DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self, *arguments, **options):
        original(self, *arguments, **options)
        _recorder.add(self)

    module.DistributedDataParallel.__init__ = __init__


class _Model:
    def __init__(self, ddp):
        self.ddp = ddp
        self.parameters = [p for p in ddp.parameters() if p.requires_grad]
        self.leads = [0.0] * len(self.parameters)
        self.counts = [0] * len(self.parameters)
        self.passes = 0
        self.ready = []

    def describe(self, steps):
        gradients = []
        for parameter, lead, count in zip(self.parameters, self.leads, self.counts):
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            if count:
                gradients.append({
                    "bytes": parameter.numel() * parameter.element_size(),
                    "rows": rows,
                    "columns": parameter.numel() // max(rows, 1),
                    "lead_s": lead / count,
                })  # fmt: skip
        return {"passes_per_step": self.passes / steps, "gradients": gradients}


class _Recorder:
    def __init__(self, steps, folder):
        self.steps, self.folder = steps, folder
        self.models = []
        self.ends = []  # of the backward() calls of the first model
        atexit.register(self.write)

    def add(self, ddp):
        model = _Model(ddp)
        self.models.append(model)
        for index, parameter in enumerate(model.parameters):
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, index=index: self.on_gradient(model, index, parameter)
            )

    def on_gradient(self, model, index, parameter):
        import torch

        if not model.ddp.require_backward_grad_sync:
            return
        if not model.ready:
            if model is self.models[0] and len(self.ends) > _WARM_UP_STEPS + self.steps:
                self.write()
                time.sleep(_BEFORE_EXIT_S)
                os._exit(0)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.on_backward_end(model))
        event = None
        if parameter.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        model.ready.append((index, time.monotonic(), event))

    def on_backward_end(self, model):
        end = None
        if model.ready[0][2]:
            import torch

            end = torch.cuda.Event(enable_timing=True)
            end.record()
            end.synchronize()
        now = time.monotonic()
        if len(self.ends) > _WARM_UP_STEPS:
            model.passes += 1
            for index, ready, event in model.ready:
                model.leads[index] += event.elapsed_time(end) * 1e-3 if event else now - ready
                model.counts[index] += 1
        model.ready = []
        if model is self.models[0]:
            self.ends.append(now)

    def write(self):
        ends = self.ends[_WARM_UP_STEPS:]
        times = [after - before for before, after in zip(ends, ends[1:])]
        if not times:
            return
        models = [model.describe(len(times)) for model in self.models if model.passes]
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        file = os.path.join(self.folder, os.environ.get("RANK", "0") + ".json")
        with open(file + ".new", "w") as out:
            json.dump({"world_size": world_size, "steps_s": times, "models": models}, out)
        os.replace(file + ".new", file)
