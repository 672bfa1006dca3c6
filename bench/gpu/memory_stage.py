"""Stage memory: the largest batch and the peak with O0 and O1, under a cap of the allocator, beside PyTorch's."""

from results import Failed, Refused
from stage import Row
from worker import OutOfMemory, Worker

MODELS = ["resnet50", "gpt"]
LEVELS = {"O0": "32", "O1": "fp16-mixed"}
CAP = 16 << 30  # bytes of the device
CPU_SPARE = 24 << 20  # without a GPU: bytes of a process beyond those that it uses after steps with a batch of 1


class Search:
    """The largest batch of one implementation and level that fits under the cap."""

    def __init__(self, context, model, impl, level):
        self.context, self.model, self.impl, self.precision = context, model, impl, LEVELS[level]
        self.worker, self.peaks, self.cap, self.ended_by = None, {}, 0, None
        if context.device == "cpu":
            try:
                self.fits(1)
                self.cap = self.worker.data_bytes() + CPU_SPARE
            finally:
                self.close()

    def fresh_worker(self):
        if self.worker is None or not self.worker.alive():
            environment = {}
            if self.context.device == "cuda":
                environment["PYTORCH_CUDA_ALLOC_CONF"] = (
                    f"per_process_memory_fraction:{CAP / self.context.gpu_bytes:.6f}"
                )
            self.worker = Worker(self.context, self.impl, self.model, environment, self.cap)
        return self.worker

    def fits(self, batch):
        """Returns whether two steps fit: the optimizer allocates its state in the first."""
        try:
            self.fresh_worker().make(self.precision, batch)
            self.peaks[batch] = self.worker.run(0, 2)["peak_bytes"]
            return True
        except OutOfMemory:
            if self.cap:  # without a GPU, a process that has once failed to allocate is not a fair start
                self.close()
            return False
        except Failed as why:
            if not self.peaks:
                raise
            self.ended_by = str(why)  # a kernel that does not take as large a batch
            self.close()
            return False

    def largest(self, start=1):
        """Doubles the batch from `start`, then bisects to a sixty-fourth, or to an eighth of a tiny model's."""
        parts = 8 if self.context.tiny else 64
        fitting, too_much = 0, start
        while self.fits(too_much):
            fitting, too_much = too_much, 2 * too_much
        while too_much - fitting > max(1, fitting // parts):
            middle = (fitting + too_much) // 2
            if self.fits(middle):
                fitting = middle
            else:
                too_much = middle
        return fitting

    def close(self):
        if self.worker:
            self.worker.close()
            self.worker = None


def measure(context, model, impl):
    if context.device == "cpu" and not context.tiny:
        raise Refused("without a GPU only tiny models are tried, to not exhaust the machine")
    found = {}
    for level in LEVELS:
        search = Search(context, model, impl, level)
        try:
            base = found.get("O0", {}).get("batch") or 1
            batch = search.largest(start=base)
            same = base if "O0" in found else batch  # both levels at the batch that O0 can train
            if batch >= 1 and same not in search.peaks:
                search.fits(same)
            found[level] = {
                "batch": batch,
                "peak_bytes": search.peaks.get(batch),
                "peak_bytes_at_batch_of_O0": search.peaks.get(same),
                "cap_bytes": search.cap or CAP,
            }
            if search.ended_by:
                found[level]["ended_by"] = search.ended_by
        finally:
            search.close()
    result = {"model": model, "impl": impl, "levels": found}
    o0, o1 = found["O0"], found["O1"]
    if o0["batch"] and o1["peak_bytes_at_batch_of_O0"]:
        result["batch_O1_to_O0"] = round(o1["batch"] / o0["batch"], 3)
        result["peak_O1_to_O0"] = round(o1["peak_bytes_at_batch_of_O0"] / o0["peak_bytes"], 3)
    return result


def rows(context):
    impls = ["lockstep-fused", "pytorch-ddp-fused"] if context.python else ["lockstep-fused"]
    for model in MODELS[-1:] if context.tiny else MODELS:
        for impl in impls:
            yield Row(f"{model}, {impl}", 75, lambda m=model, i=impl: measure(context, m, i))
