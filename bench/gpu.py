#!/usr/bin/env python3
"""Compares training steps on a GPU in C++ with Lockstep and in Python with PyTorch, with the same libtorch.

Prints a line of JSON for each implementation, model and precision, and a table at the end. All implementations are
started first and then measured in turns, in rotating order, for several rounds. They have the same initial weights and
data, and the run fails if their first losses differ. A ratio is the median over the rounds of (time / time of the
first) in the same round.

Parts: step (time and peak memory), batch (the largest batch that fits, found in fresh processes that run out of
memory), ranks (two ranks on one GPU over Gloo, whose losses must equal those of one rank). --device cpu runs the same
without a GPU; --tiny uses models with steps of milliseconds.
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = pathlib.Path(__file__).resolve().parent
MODELS = {"gpt": 8, "resnet50": 64}  # samples in a step
PRECISIONS = ["32", "bf16-mixed", "fp16-mixed"]
LEVELS = {"O0": "32", "O1": "fp16-mixed"}
# Name: argument of bench_gpu_step and environment variables. The names in PYTORCH are arguments of gpu_step.py.
LOCKSTEP = {
    "lockstep": ("lockstep", {}),
    "lockstep-fused": ("lockstep-fused", {}),
    "lockstep-nccl": ("lockstep", {"LOCKSTEP_TRANSPORT": "nccl"}),
}
PYTORCH = ["pytorch-ddp", "pytorch-ddp-fused", "pytorch-ddp-loop", "pytorch"]
FIRST_STEPS = 3
# The largest relative difference of a loss from that of the first implementation: in the first step, and in later
# steps, after the optimizers have rounded differently.
APART = {"32": (1e-5, 1e-4), "bf16-mixed": (2e-3, 1e-2), "fp16-mixed": (1e-3, 5e-3)}


class NotMeasured(Exception):
    """An implementation refused to run, with the reason."""


class OutOfMemory(Exception):
    """A process ran out of memory."""


class Program:
    """A process that runs steps on request."""

    def __init__(self, args, impl, model, precision, batch):
        words = [model, "tiny" if args.tiny else "full", precision, str(batch), args.device, str(args.threads)]
        if impl in LOCKSTEP:
            word, more = LOCKSTEP[impl]
            words = [str(args.bin / "bench_gpu_step"), word, *words]
        else:
            more = {}
            words = [args.python, str(HERE / "gpu_step.py"), impl, *words]
        self.impl, self.limit_s = impl, args.timeout
        self.stderr = tempfile.TemporaryFile("w+")
        limit = args.memory_limit << 20
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **more},
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))) if limit else None,
        )
        try:
            self.about = self.read_result()
        except BaseException:
            self.close()
            raise

    def read_result(self):
        """Returns the next result. Raises NotMeasured or OutOfMemory."""
        if not select.select([self.process.stdout], [], [], self.limit_s)[0]:
            raise SystemExit(
                f"gpu.py: {self.impl} printed nothing for {self.limit_s} s; a larger --timeout allows more"
            )
        line = self.process.stdout.readline()
        result = json.loads(line) if line else {}
        if "refused" in result:
            raise NotMeasured(result["refused"])
        if "out_of_memory" in result or (not line and self.process.wait() == -signal.SIGKILL):
            raise OutOfMemory(result.get("out_of_memory", "killed"))
        if not line:
            self.stderr.seek(0)
            raise SystemExit(f"gpu.py: {self.impl} exited with {self.process.returncode}:\n{self.stderr.read()}")
        return result

    def measure(self, warm_up, measured):
        """Runs steps and returns their result."""
        with contextlib.suppress(BrokenPipeError):  # its last line has the reason
            self.process.stdin.write(f"{warm_up} {measured}\n".encode())
            self.process.stdin.flush()
        return self.read_result()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.stderr.close()


def print_row(row):
    """Prints a row as JSON and returns it."""
    print(json.dumps(row), flush=True)
    return row


def not_measured(args, impl, why, **what):
    print(f"not measured: {impl} {' '.join(what.values())}: {why}", file=sys.stderr, flush=True)
    return print_row({"what": "not_measured", "impl": impl, "device": args.device, **what, "why": why})


def relative_differences(losses, others):
    return [abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)]


def compare(args, model, precision):
    """Measures all implementations in turns."""
    batch = args.batch or (4 if args.tiny else MODELS[model])
    rows, programs = [], {}
    with contextlib.ExitStack() as stack:
        first = {}
        for impl in args.impl:
            try:
                program = Program(args, impl, model, precision, batch)
                stack.callback(program.close)
                first[impl] = program.measure(0, FIRST_STEPS)
                programs[impl] = program
            except (NotMeasured, OutOfMemory) as why:
                rows.append(not_measured(args, impl, str(why), model=model, precision=precision))
        times = {impl: [] for impl in programs}
        memory = dict(first)
        names = list(programs)
        for number in range(args.rounds):
            for impl in names[number % len(names) :] + names[: number % len(names)]:
                memory[impl] = programs[impl].measure(1, args.steps)
                times[impl].append(memory[impl]["ms"])
        for impl in names:
            found = relative_differences(first[impl]["losses"], first[names[0]]["losses"])
            rows.append(
                print_row(
                    {
                        "what": "gpu_step",
                        "impl": impl,
                        "model": model,
                        "precision": precision,
                        "batch": batch,
                        **programs[impl].about,
                        "ms": round(statistics.median(times[impl]), 4),
                        "min_ms": round(min(times[impl]), 4),
                        "runs": len(times[impl]),
                        "ratio": round(
                            statistics.median(a / b for a, b in zip(times[impl], times[names[0]], strict=True)), 4
                        ),
                        "ratio_to": names[0],
                        "peak_bytes": memory[impl]["peak_bytes"],
                        "reserved_bytes": memory[impl]["reserved_bytes"],
                        "losses": first[impl]["losses"],
                        "apart": max(found),
                        "equal": found[0] <= APART[precision][0] and max(found) <= APART[precision][1],
                    }
                )
            )
    return rows


def fits(args, impl, model, precision, batch):
    """Returns whether two steps fit into memory. The optimizer allocates its state in the first."""
    try:
        program = Program(args, impl, model, precision, batch)
    except OutOfMemory:
        return False
    try:
        program.measure(0, 2)
        return True
    except OutOfMemory:
        return False
    finally:
        program.close()


def largest_batch(args, model, level, impl):
    """Finds the largest batch to within a sixteenth: doubles it, then bisects."""
    fitting, too_much = 0, 1
    while too_much <= args.most_samples and fits(args, impl, model, LEVELS[level], too_much):
        fitting, too_much = too_much, 2 * too_much
    if too_much <= args.most_samples:
        while too_much - fitting > max(1, fitting // 16):
            middle = (fitting + too_much) // 2
            if fits(args, impl, model, LEVELS[level], middle):
                fitting = middle
            else:
                too_much = middle
    return print_row(
        {
            "what": "gpu_batch",
            "impl": impl,
            "model": model,
            "level": level,
            "precision": LEVELS[level],
            "device": args.device,
            "batch": fitting,
            "more_than": too_much if too_much <= args.most_samples else None,
        }
    )


def two_ranks(args, model, precision):
    """Compares two ranks on one device, each with half of the batch, with one rank."""
    words = [
        str(args.bin / "bench_gpu_step"),
        "lockstep",
        model,
        "tiny" if args.tiny else "full",
        precision,
        "4",
        args.device,
        str(args.threads),
        str(FIRST_STEPS),
    ]
    run = [str(args.bin / "lockstep"), "run", "-n", "2", "--bind", "none", "--transport", "gloo", "--"]
    results = []
    for start in ([], run):
        done = subprocess.run([*start, *words], capture_output=True, text=True, timeout=args.timeout, check=False)
        lines = [
            line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line
        ]  # each line begins with "[0] "
        if done.returncode != 0 or not lines:
            return not_measured(
                args,
                "lockstep on two ranks" if start else "lockstep",
                (lines or done.stderr.strip().splitlines() or ["?"])[-1],
                model=model,
                precision=precision,
            )
        results.append(json.loads(lines[-1]))
    alone, both = results
    found = relative_differences(both["losses"], alone["losses"])
    return print_row(
        {
            "what": "gpu_ranks",
            "model": model,
            "precision": precision,
            "device": args.device,
            "ranks": both["ranks"],
            "transport": both["transport"],
            "losses": both["losses"],
            "alone": alone["losses"],
            "apart": max(found),
            "equal": max(found) <= APART[precision][1],
        }
    )


def table(rows):
    steps = [row for row in rows if row["what"] == "gpu_step"]
    for model, precision in dict.fromkeys((row["model"], row["precision"]) for row in steps):
        same = [row for row in steps if (row["model"], row["precision"]) == (model, precision)]
        first = same[0]
        size = f"{model} ({first['parameters']:,} parameters)"
        device = first.get("gpu", first["device"])
        yield f"\n{size}, {precision}, batch {first['batch']}, {device}, libtorch {first['libtorch']}\n"
        yield f"| | median ms | min ms | ratio to {first['ratio_to']} | peak MiB | reserved MiB | loss difference |"
        yield "|---|---|---|---|---|---|---|"
        for row in same:
            yield (
                f"| {row['impl']} | {row['ms']:.2f} | {row['min_ms']:.2f} | {row['ratio']:.3f} "
                f"| {row['peak_bytes'] / (1 << 20):.0f} | {row['reserved_bytes'] / (1 << 20):.0f} "
                f"| {row['apart']:.1e}{'' if row['equal'] else ' TOO LARGE'} |"
            )
    for row in rows:
        if row["what"] == "gpu_batch":
            yield (
                f"largest batch of {row['model']} with {row['level']} ({row['precision']}), "
                f"{row['impl']}: {row['batch']}" + ("" if row["more_than"] else " or more")
            )
        if row["what"] == "gpu_ranks":
            yield (
                f"{row['ranks']} ranks on one {row['device']} over {row['transport']}, "
                f"{row['model']}, {row['precision']}: "
                f"losses differ by {row['apart']:.1e} from those of one rank{'' if row['equal'] else ', TOO MUCH'}"
            )
        if row["what"] == "not_measured":
            yield f"not measured: {row['impl']}, {row.get('model', '')} {row.get('precision', '')}: {row['why']}"


def some_of(name, choices):
    """Returns a parser of comma-separated choices."""

    def parse(text):
        words = text.split(",")
        for word in words:
            if word not in choices:
                raise argparse.ArgumentTypeError(f'{name} has "{word}"; expected {", ".join(choices)}')
        return words

    return parse


def at_least(minimum):
    """Returns a parser of integers from `minimum`."""

    def parse(text):
        if not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f'"{text}"; expected an integer of at least {minimum}')
        return int(text)

    return parse


def parse_arguments():
    own = ROOT / ".deps/python/bin/python3"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="use models with steps of milliseconds, to test this script"
    )
    parser.add_argument(
        "--parts", type=some_of("--parts", ["step", "batch", "ranks"]), default=["step", "batch", "ranks"]
    )
    parser.add_argument("--models", type=some_of("--models", list(MODELS)), default=list(MODELS))
    parser.add_argument("--precisions", type=some_of("--precisions", PRECISIONS), default=PRECISIONS)
    parser.add_argument(
        "--levels",
        type=some_of("--levels", list(LEVELS)),
        default=list(LEVELS),
        help="precision levels of the part batch",
    )
    parser.add_argument(
        "--impl",
        type=some_of("--impl", [*LOCKSTEP, *PYTORCH]),
        help="implementations (default: all that the device and --python support)",
    )
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--steps", type=at_least(1), default=10, help="measured steps per turn")
    parser.add_argument("--batch", type=at_least(1), help="batch size of the part step (default: 8 texts, 64 images)")
    parser.add_argument("--most-samples", type=at_least(1), default=1 << 16, help="upper limit of the part batch")
    parser.add_argument(
        "--memory-limit",
        type=at_least(0),
        default=0,
        help="limit of a process's host memory in MiB, for the part batch with --device cpu",
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="CPU threads per process")
    parser.add_argument("--timeout", type=at_least(1), default=300, help="seconds per turn")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument(
        "--python",
        default=str(own) if own.exists() else sys.executable,
        help='a Python interpreter with torch, or "" for none',
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the lines of JSON to this file")
    args = parser.parse_args()
    if args.impl is None:
        args.impl = [
            impl
            for impl in [*LOCKSTEP, *PYTORCH]
            if (impl in LOCKSTEP or args.python) and (args.device == "cuda" or impl != "lockstep-nccl")
        ]
    return args


def expect_device(args):
    """Exits with an error if the device is not available."""
    try:
        tiny = argparse.Namespace(**{**vars(args), "tiny": True})
        Program(tiny, "lockstep", "gpt", "32", 1).close()
    except NotMeasured as why:
        sys.exit(f"gpu.py: --device is {args.device}, which is not available: {why}")


def main():
    args = parse_arguments()
    expect_device(args)
    rows = []
    if "step" in args.parts:
        for model in args.models:
            for precision in args.precisions:
                rows += compare(args, model, precision)
    if "batch" in args.parts:
        if args.device == "cpu" and not args.memory_limit:
            rows.append(
                not_measured(
                    args, "the largest batch", "on a CPU, --memory-limit MIB is required, to not exhaust the machine"
                )
            )
        else:
            for model in args.models:
                for level in args.levels:
                    for impl in (impl for impl in ("lockstep", "pytorch-ddp") if impl in args.impl):
                        rows.append(largest_batch(args, model, level, impl))
    if "ranks" in args.parts:
        for model in args.models:
            rows.append(two_ranks(args, model, "32"))
    print("\n".join(table(rows)), file=sys.stderr)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if any(row.get("equal") is False for row in rows):
        sys.exit("gpu.py: the losses of the implementations differ too much")


main()
