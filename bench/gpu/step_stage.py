"""Stage step: a training step with Lockstep beside PyTorch's, with the same weights, data and losses."""

import statistics

from results import Failed, Refused
from stage import Row
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


def differences(losses, others):
    return [abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)]


class Pool:
    """The workers of one model, which later rows with the same model use again."""

    def __init__(self, context):
        self.context, self.model, self.workers = context, None, {}

    def worker(self, model, impl):
        if model != self.model:
            self.close()
            self.model = model
        if impl not in self.workers or not self.workers[impl].alive():
            self.workers[impl] = Worker(self.context, impl, model)
        return self.workers[impl]

    def close(self):
        for worker in self.workers.values():
            worker.close()
        self.workers = {}


class Comparison:
    """One row: all implementations of one model and precision, measured in turns."""

    def __init__(self, context, pool, model, precision, impls):
        self.context, self.pool = context, pool
        self.model, self.precision, self.impls = model, precision, impls
        self.batch = min(BATCH[model], 2) if context.tiny else BATCH[model]
        self.first, self.about, self.rows, self.refused = {}, {}, {}, {}
        self.rounds = 2 if context.tiny else 5

    def begin(self, impls):
        """Makes the trainings of `impls`, runs their first steps, and returns those that can be measured."""
        for impl in impls:  # all begin at once: most of a start is waiting
            self.pool.worker(self.model, impl).send("make", self.precision, self.batch)
        for impl in impls:
            worker = self.pool.worker(self.model, impl)
            try:
                self.about[impl] = worker.receive()
                self.first[impl] = worker.run(0, FIRST_STEPS)
            except (Refused, OutOfMemory) as why:
                self.refused[impl] = str(why)
        return [impl for impl in impls if impl in self.first]

    def measure(self, impls):
        """Measures in turns, in rotating order, and adds the rows."""
        found = {impl: [] for impl in impls}
        for impl in impls:
            found[impl].append(self.pool.worker(self.model, impl).run(2, 3))  # also captures the graphs
        measured = {}
        for impl in impls:
            measured[impl] = max(2, min(30, round(400 / found[impl][0]["ms"])))
        for number in range(self.rounds):
            for impl in impls[number % len(impls) :] + impls[: number % len(impls)]:
                found[impl].append(self.pool.worker(self.model, impl).run(1, measured[impl]))
        for impl in impls:
            if impl in self.rows:
                continue  # the reference takes part in each group
            times = [result["ms"] for result in found[impl][1:]]
            reference = [result["ms"] for result in found[impls[0]][1:]]
            last = found[impl][-1]
            self.rows[impl] = {
                "ms": round(statistics.median(times), 4),
                "min_ms": round(min(times), 4),
                "ratio": round(statistics.median(a / b for a, b in zip(times, reference, strict=True)), 4),
                "synchronizations": last["synchronizations"],
                "peak_bytes": last["peak_bytes"],
                "reserved_bytes": last["reserved_bytes"],
            }

    def groups(self):
        """Yields the implementations that fit into the device's memory at the same time, each with the reference."""
        reference, *others = self.begin(self.impls[:1]) or [None]
        if reference is None:
            raise Failed(f"{self.impls[0]}: {self.refused[self.impls[0]]}")
        others, size = self.impls[1:], len(self.impls)
        if self.context.gpu_bytes:
            used = max(self.first[reference]["reserved_bytes"], 1)
            size = max(1, int(SHARE * self.context.gpu_bytes / used) - 1)
        while others:
            group, others = others[:size], others[size:]
            yield [reference, *self.begin(group)]
            if others:
                for impl in group:
                    self.pool.workers.pop(impl).close()

    def result(self):
        for group in self.groups():
            self.measure(group)
        wrong = []
        for impl, row in self.rows.items():
            found = differences(self.first[impl]["losses"], self.first[self.impls[0]]["losses"])
            row.update(losses=self.first[impl]["losses"], apart=max(found))
            if found[0] > APART[self.precision][0] or max(found) > APART[self.precision][1]:
                wrong.append(impl)
        result = {
            "model": self.model,
            "precision": self.precision,
            "batch": self.batch,
            "ratio_to": self.impls[0],
            "rounds": self.rounds,
            **self.about[self.impls[0]],
            "impls": self.rows,
            "not_measured": self.refused,
        }
        if wrong:
            raise Failed(f"the losses of {', '.join(wrong)} differ from those of {self.impls[0]}", **result)
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
            seconds = 15 if context.tiny else 60 if impls is COMPILED else 45
            yield Row(name, seconds, lambda m=model, p=precision, i=impls: compare(m, p, i))
    finally:
        pool.close()
