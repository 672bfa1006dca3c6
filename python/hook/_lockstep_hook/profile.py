"""Records the steps of a program with torch's DistributedDataParallel for `lockstep plan`, as
lockstep/ddp/step_profile.h does for Lockstep's. Imported only under `lockstep plan`, while torch is imported."""

import atexit
import contextlib
import functools
import json
import os
import time

_WARM_UP_STEPS = 5
_LEAST_S, _MOST_STEPS = 3, 1000
_OTHER_PASSES = 50  # of another model since the last step of the one that counts: that one was replaced
_BEFORE_EXIT_S = 0.5  # peers may still need this process for the end of the last reduction
_recorder = None


def keep_files(serialization):
    """torch.save() writes only below the temporary folder of `lockstep plan`, and no file through a link."""

    @functools.wraps(serialization.save)
    def save(obj, f, *arguments, **options):
        if isinstance(f, (str, os.PathLike)):
            folder = os.environ["LOCKSTEP_PROFILE"].split(":", 1)[1]
            if not (os.path.realpath(os.path.dirname(os.path.abspath(f))) + "/").startswith(folder + "/"):
                return
            if os.path.islink(f):
                with contextlib.suppress(FileNotFoundError):  # another rank was first
                    os.unlink(f)
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


def _write(path, text):
    """Whoever reads the file finds all of it. Several ranks may write one."""
    new = f"{path}.{os.getpid()}"
    with open(new, "w") as out:
        out.write(text)
    os.replace(new, path)


class _Model:
    def __init__(self, ddp):
        self.ddp = ddp
        self.parameters = [p for p in ddp.parameters() if p.requires_grad]
        self.leads = [0.0] * len(self.parameters)
        self.counts = [0] * len(self.parameters)
        self.passes = self.passes_since_end = 0
        self.ready = []
        self.is_armed = False  # forward() has run since the last backward()
        ddp.register_forward_pre_hook(self.arm)

    def arm(self, *_):
        self.is_armed = True

    def describe(self, steps):
        gradients = []
        for parameter, lead, count in zip(self.parameters, self.leads, self.counts):
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            gradients.append({
                "bytes": parameter.numel() * parameter.element_size(),
                "rows": rows,
                "columns": parameter.numel() // max(rows, 1),
                "is_float32": str(parameter.dtype) == "torch.float32",
                "count": count,
                "lead_s": lead / max(count, 1),
            })  # fmt: skip
        return {"passes_per_step": self.passes / steps, "gradients": gradients}


class _Recorder:
    def __init__(self, steps, folder):
        self.steps, self.folder = steps, folder  # until has_agreed, the least number
        self.rank = os.environ.get("RANK", "0")
        self.has_agreed = False
        self.models = []
        self.counted = None  # the model whose steps count: the first, until it is replaced
        self.ends = []  # of its backward() calls
        atexit.register(self.write)

    def add(self, ddp):
        model = _Model(ddp)
        self.models.append(model)
        self.counted = self.counted or model
        for index, parameter in enumerate(model.parameters):
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, index=index: self.on_gradient(model, index, parameter)
            )

    def on_gradient(self, model, index, parameter):
        import torch

        if not model.ddp.require_backward_grad_sync:
            return
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if model.is_armed:  # the first one of a backward(); one that failed may have left others
            if model is self.counted and self.has_agreed and len(self.ends) > _WARM_UP_STEPS + self.steps:
                self.write()
                time.sleep(_BEFORE_EXIT_S)
                os._exit(0)
            model.is_armed, model.ready = False, []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.on_backward_end(model))
        event = None
        if parameter.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(parameter.device))
        model.ready.append((index, time.monotonic(), event))

    def on_backward_end(self, model):
        if not model.ready:
            return
        ends = {}  # by device
        for index, _, event in model.ready:
            device = model.parameters[index].device
            if event and device not in ends:
                import torch

                ends[device] = torch.cuda.Event(enable_timing=True)
                ends[device].record(torch.cuda.current_stream(device))
        for end in ends.values():
            end.synchronize()
        now = time.monotonic()
        if model is not self.counted:
            model.passes_since_end += 1
            if model.passes_since_end >= _OTHER_PASSES:
                self.counted, self.ends = model, []
                for one in self.models:
                    one.passes = 0
        if len(self.ends) > _WARM_UP_STEPS:
            model.passes += 1
            for index, ready, event in model.ready:
                end = ends.get(model.parameters[index].device)
                model.leads[index] += event.elapsed_time(end) * 1e-3 if event else now - ready
                model.counts[index] += 1
        model.ready = []
        if model is not self.counted:
            return
        for one in self.models:
            one.passes_since_end = 0
        self.ends.append(now)
        if len(self.ends) == 1:
            _write(os.path.join(self.folder, "begun"), "")
        if not self.has_agreed:
            self.agree_on_steps()

    def agree_on_steps(self):
        """Rank 0 chooses the number, so that the steps take _LEAST_S, and the others read it."""
        recorded = len(self.ends) - 1 - _WARM_UP_STEPS
        file = os.path.join(self.folder, "steps")
        if self.rank == "0" and recorded == 1:
            step_s = (self.ends[-1] - self.ends[0]) / (_WARM_UP_STEPS + 1)
            self.steps = max(self.steps, min(int(_LEAST_S / step_s), _MOST_STEPS))
            _write(file, str(self.steps))
            self.has_agreed = True
        elif self.rank != "0" and recorded > 2 and os.path.exists(file):
            with open(file) as chosen:
                self.steps = int(chosen.read())
            self.has_agreed = True

    def write(self):
        ends = self.ends[_WARM_UP_STEPS:]
        times = [after - before for before, after in zip(ends, ends[1:])]
        if not times:
            return
        models = [model.describe(len(times)) for model in self.models if model.passes]
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        text = json.dumps({"world_size": world_size, "steps_s": times, "models": models})
        _write(os.path.join(self.folder, self.rank + ".json"), text)
