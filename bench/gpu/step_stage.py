"""Stage step: a training step with Lockstep beside PyTorch's, with the same weights, data and losses."""

import contextlib
import math
import statistics

from results import Failed, Refused
from stage import FIRST, LAST, LATER, Row
from worker import LOCKSTEP, PYTORCH, OutOfMemory, Worker

BATCH = {"gpt": 8, "gpt-short": 1, "resnet50": 64, "resnet18": 8}
REFERENCE = "pytorch-ddp-fused"
EAGER = [REFERENCE, *LOCKSTEP, "pytorch-ddp", "pytorch-graph"]
COMPILED = [REFERENCE, "lockstep-fused", "lockstep-graph", "pytorch-compile", "pytorch-overhead"]
# In the order of their worth.
MUST = [
    ("gpt", "32"),
    ("gpt", "bf16-mixed"),
    ("gpt-short", "32"),
    ("gpt-short", "bf16-mixed"),
    ("resnet50", "32"),
    ("resnet50", "bf16-mixed"),
    ("resnet18", "bf16-mixed"),
]
TINY = ["gpt 32", "gpt bf16-mixed", "resnet18 bf16-mixed", "gpt-short fp16-mixed", "gpt bf16-mixed compiled"]
FIRST_STEPS = 3
# The largest relative difference of a loss from that of the first implementation: in the first step, and in later
# steps, after the optimizers have rounded differently.
APART = {"32": (1e-5, 1e-4), "tf32": (1e-3, 5e-3), "bf16-mixed": (2e-3, 1e-2), "fp16-mixed": (1e-3, 5e-3)}
SHARE = 0.8  # of the device's memory, for all implementations of a turn together


GRAPHS = ("lockstep-graph", "pytorch-graph", "pytorch-overhead")
CONTEXT_BYTES = 600 << 20  # of the device, in each process


def differences(losses, others):
    """Returns the relative differences; infinity where a loss is not a number."""
    numbers = [(a, b) if None not in (a, b) else (math.nan, 1) for a, b in zip(losses, others, strict=True)]
    found = [abs(a - b) / abs(b) for a, b in numbers]
    return [math.inf if math.isnan(one) else one for one in found]


class Pool:
    """The workers of one model, which later rows with the same model use again."""

    def __init__(self, context):
        self.context, self.model, self.workers = context, None, {}

    def begin_row(self, model):
        """Gives the memory of all trainings back."""
        if model != self.model:
            self.close()
            self.model = model
        for impl, worker in list(self.workers.items()):
            try:
                worker.drop()
            except (Refused, Failed):
                self.forget(impl)

    def worker(self, impl):
        if impl not in self.workers or not self.workers[impl].alive():
            self.workers[impl] = Worker(self.context, impl, self.model)
        return self.workers[impl]

    def forget(self, impl):
        if impl in self.workers:
            self.workers.pop(impl).close()

    def close(self):
        for impl in list(self.workers):
            self.forget(impl)


class Comparison:
    """One row: all implementations of one model and precision, measured in turns."""

    def __init__(self, context, pool, model, precision, impls):
        self.context, self.pool = context, pool
        self.model, self.precision, self.impls = model, precision, impls
        self.batch = min(BATCH[model], 2) if context.tiny else BATCH[model]
        self.first, self.about, self.rows = {}, {}, {}
        self.refused, self.failed = {}, {}  # by implementation: the reason
        self.rounds = 2 if context.tiny else 5

    @contextlib.contextmanager
    def of(self, impl):
        """Notes an error of one implementation, whose process ends, and lets the others go on."""
        try:
            yield
        except (Refused, OutOfMemory) as why:
            self.refused[impl] = str(why)
            self.pool.forget(impl)
        except Failed as why:
            self.failed[impl] = str(why)
            self.pool.forget(impl)

    def good(self, impls):
        return [impl for impl in impls if impl not in self.refused and impl not in self.failed]

    def begin(self, impls):
        """Makes the trainings of `impls`, runs their first steps, and returns those that can be measured."""
        workers = {impl: self.pool.worker(impl) for impl in impls}
        for worker in workers.values():  # all begin at once: most of a start is waiting
            worker.send("make", self.precision, self.batch)
        for impl, worker in workers.items():
            with self.of(impl):
                self.about[impl] = worker.receive()
                self.first[impl] = worker.run(0, FIRST_STEPS)
        return self.good(impls)

    def measure(self, impls):
        """Measures in turns, in rotating order, and adds the rows."""
        found, measured = {impl: [] for impl in impls}, {}
        for impl in impls:
            with self.of(impl):
                once = self.pool.worker(impl).run(2, 3)  # also captures the graphs
                measured[impl] = max(2, min(30, round(400 / once["ms"])))
        for number in range(self.rounds):
            for impl in impls[number % len(impls) :] + impls[: number % len(impls)]:
                if impl in self.good(impls):
                    with self.of(impl):
                        found[impl].append(self.pool.worker(impl).run(1, measured[impl]))
        if self.impls[0] not in self.good(impls):
            raise Failed(f"{self.impls[0]}: {self.reason(self.impls[0])}")
        for impl in self.good(impls):
            if impl in self.rows:
                continue  # the reference takes part in each group
            times = [result["ms"] for result in found[impl]]
            reference = [result["ms"] for result in found[self.impls[0]]]
            last = found[impl][-1]
            self.rows[impl] = {
                "ms": round(statistics.median(times), 4),
                "min_ms": round(min(times), 4),
                "ratio": round(statistics.median(a / b for a, b in zip(times, reference, strict=True)), 4),
                "synchronizations": last["synchronizations"],
                "peak_bytes": last["peak_bytes"],
                "reserved_bytes": last["reserved_bytes"],
            }

    def reason(self, impl):
        return self.failed.get(impl) or self.refused.get(impl)

    def groups(self):
        """Yields the implementations that fit into the device's memory at the same time, each with the reference."""
        reference = self.impls[0]
        if not self.begin([reference]):
            raise Failed(f"{reference}: {self.reason(reference)}")
        others = self.impls[1:]
        while others:
            group = self.fitting(others)
            others = others[len(group) :]
            yield [reference, *self.begin(group)]
            if others:
                for impl in group:
                    self.pool.forget(impl)

    def fitting(self, others):
        """Returns the first of `others` that fit beside the reference, at least one. A graph has memory of its own
        beside that of the eager steps before it."""
        if not self.context.gpu_bytes:
            return others
        own = max(self.first[self.impls[0]]["reserved_bytes"], 1)
        left, count = SHARE * self.context.gpu_bytes - own - CONTEXT_BYTES, 0
        for impl in others:
            left -= own * (2 if impl in GRAPHS else 1) + CONTEXT_BYTES
            if left < 0:
                break
            count += 1
        return others[: max(count, 1)]

    def result(self):
        self.pool.begin_row(self.model)
        for group in self.groups():
            self.measure(group)
        wrong = []
        for impl, row in self.rows.items():
            found = differences(self.first[impl]["losses"], self.first[self.impls[0]]["losses"])
            row.update(losses=self.first[impl]["losses"], apart=max(found))
            if found[0] > APART[self.precision][0] or max(found) > APART[self.precision][1]:
                wrong.append(f"the losses of {impl} differ from those of {self.impls[0]}")
        result = {
            "model": self.model,
            "precision": self.precision,
            "batch": self.batch,
            "ratio_to": self.impls[0],
            "rounds": self.rounds,
            **self.about[self.impls[0]],
            "impls": self.rows,
            "not_measured": {**self.refused, **self.failed},
        }
        on_gpu = self.context.device == "cuda"
        wrong += [f"{why}" for impl, why in self.failed.items() if impl in LOCKSTEP]
        wrong += [f"{impl}: {why}" for impl, why in self.refused.items() if impl in LOCKSTEP and on_gpu]
        if wrong:
            raise Failed("; ".join(wrong), **result)
        return result


def implementations(context, impls):
    """Returns those that this machine can run: `--python ""` means that there is no PyTorch to compare with."""
    return [impl for impl in impls if (impl not in PYTORCH or context.python)]


def rows(context):
    pool = Pool(context)

    def compare(model, precision, impls):
        return Comparison(context, pool, model, precision, implementations(context, impls)).result()

    precisions = ["tf32", "fp16-mixed"] if context.device == "cuda" else ["fp16-mixed"]
    plan = [(f"{model} {precision}", model, precision, EAGER) for model, precision in MUST]
    plan += [
        (f"{model} {precision}", model, precision, EAGER)
        for model in BATCH
        for precision in (["32", "bf16-mixed", *precisions])
        if (model, precision) not in MUST
    ]
    plan += [(f"{model} bf16-mixed compiled", model, "bf16-mixed", COMPILED) for model in BATCH]
    if context.tiny:  # each kind once: compiling takes longer than everything else
        plan = [one for one in plan if one[0] in TINY]
    try:
        for name, model, precision, impls in plan:
            compiled = impls is COMPILED
            seconds = 15 if context.tiny else 60 if compiled else 45
            worth = LAST if compiled else FIRST if (model, precision) in MUST else LATER
            yield Row(name, seconds, lambda m=model, p=precision, i=impls: compare(m, p, i), worth=worth)
    finally:
        pool.close()
