#!/usr/bin/env python3
"""Measures how long trainings take on a slow network, to the loss that PyTorch's DistributedDataParallel reaches.

Two hosts with two ranks each, or four with one, on network namespaces. A CPU computes slower than the GPUs of such
hosts, so the link is slowed until an all-reduce over gloo takes RATIO times the computation of a step. Methods that
exchange in every step do not depend on the link in what they compute: their losses come from a run without a limit, and
the time of a step from a short run with it. The others run in full on the slow link.

Prints a line of JSON for each run, and for each method a line with wall time, steps and bytes (of the busier direction
of a host's link) to the loss. Removes everything it creates; exits with 77 without root.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import cluster_job  # noqa: E402
import host_cluster  # noqa: E402
from cluster_job import Job, hosts_of_ranks, run  # noqa: E402

PER_STEP = ("ddp", "ddp bfloat16", "ddp powersgd", "powersgd", "int8")
ROUNDS = ("average", "diloco", "diloco int8", "diloco int4", "sparseloco")
CASES = {
    "gpt": {"batch": 8, "learning_rate": 2e-3},
    "cnn": {"batch": 16, "learning_rate": 1e-3},
}
# Each way between two hosts, for a parameter. A mean and DiLoCo send half of the numbers twice.
PAYLOAD_BYTES = {
    "average": 4,
    "diloco": 4,
    "diloco int8": 260 / 256,
    "diloco int4": 136 / 256,
    "sparseloco": 116 / 4096,
}
OUTER_RATE = 0.6  # of lockstep.DiLoCo() with two hosts
SETTLED = 40  # steps of a run that only measures times, after WARM ones
WARM = 12


class Bench:
    def __init__(self, args, cluster):
        self.args, self.cluster = args, cluster
        self.where = hosts_of_ranks(args.hosts, 4 // args.hosts, "contiguous")

    def run(self, method, seed, steps, rate, goal=0.0, least_steps=0):
        """Runs a training until its loss is `goal`, on links of `rate` bits per second (0: without a limit)."""
        args = self.args
        case = {
            "model": args.model, "method": method, "seed": seed, "steps": steps, "every": args.every, "goal": goal,
            "least_steps": least_steps, "outer_rate": OUTER_RATE,
            "evaluate_every": args.evaluate_every, "data": str(args.data),
            **CASES[args.model],
        }  # fmt: skip
        if rate:
            self.cluster.shape(f"{round(rate)}bit")
        try:
            words = [args.python, HERE / "slow_networks_rank.py", json.dumps(case)]
            env = {"PYTHONPATH": args.package, "LOCKSTEP_LOG": "quiet", "GLOO_SOCKET_IFNAME": "eth0"}
            result, crossed = run(self.cluster, Job, self.where, words, env)
        finally:
            if rate:
                self.cluster.unshape()
        row = {
            "model": args.model, "method": method, "seed": seed, "steps": len(result["seconds"]), "rate": round(rate),
            "parameters": result["parameters"], "bytes": crossed,
            "step_s": round(statistics.median(result["seconds"][WARM:]), 6),
            "mean_step_s": round(statistics.mean(result["seconds"][WARM:]), 6), "points": result["points"],
        }  # fmt: skip
        print(json.dumps({"what": "run", **row}), flush=True)
        return row, result["seconds"]

    def round(self, method, parameters, rate):
        """Returns the seconds of a round, and the bytes that it sends (0: on links without a limit)."""
        case = {"method": method, "parameters": parameters, "rounds": 3}
        words = [self.args.python, HERE / "slow_networks_rank.py", json.dumps(case)]
        env = {"PYTHONPATH": self.args.package, "LOCKSTEP_LOG": "quiet"}
        if rate:
            self.cluster.shape(f"{round(rate)}bit")
        try:
            result, crossed = run(self.cluster, Job, self.where, words, env)
        finally:
            if rate:
                self.cluster.unshape()
        return statistics.median(result["seconds"]), round(crossed / 3)

    def rounds(self, parameters, rate):
        """Measures a round, and one without a limit, beside the time of the bytes on the wire. The difference of the
        two is the exchange."""
        for method in ROUNDS:
            without, _ = self.round(method, parameters, 0)
            seconds, crossed = self.round(method, parameters, rate)
            bound = 8 * parameters * PAYLOAD_BYTES[method] / (0.955 * rate)  # each way, between two hosts
            row = {
                "what": "round", "method": method, "parameters": parameters, "rate": rate,
                "round_s": round(seconds, 4), "without_limit_s": round(without, 4), "bound_s": round(bound, 4),
                "round_to_bound": round(seconds / bound, 3), "exchange_to_bound": round((seconds - without) / bound, 3),
                "bytes": crossed,
            }  # fmt: skip
            print(json.dumps(row), flush=True)

    def beside_torchft(self):
        """Validation losses of DiLoCo on two hosts with one rank each, beside torchft's with the same numbers."""
        self.where = hosts_of_ranks(2, 1, "contiguous")
        for seed in self.args.seeds:
            for method in ("diloco", "torchft diloco"):
                self.run(method, seed, self.args.steps, 0, least_steps=self.args.steps)

    def settle(self):
        """Returns the computation of a step and the rate at which an all-reduce takes `ratio` times as long."""
        row, _ = self.run("alone", 1, WARM + SETTLED, 0)
        crossing = 8 * 2 * 3 / 4 * 4 * row["parameters"]  # bits that the ring of four ranks sends over a link
        rate = crossing / (self.args.ratio * row["step_s"]) / 0.955  # of which headers are the rest
        return row["step_s"], rate

    def times(self):
        """Measures the mean time of steps only, with two rounds."""
        steps = WARM + 2 * self.args.every
        for method in ("ddp", *(m for m in self.args.methods if m != "ddp")):
            row, _ = self.run(method, 1, 20 if method == "ddp" else steps, self.args.rate)
            print(
                json.dumps({
                    "what": "times", "model": self.args.model, "method": method, "rate": self.args.rate,
                    "delay_ms": self.args.delay_ms, "loss": self.args.loss, "mean_step_s": row["mean_step_s"],
                }),
                flush=True,
            )  # fmt: skip

    def compare(self):
        args = self.args
        compute, rate = self.settle()
        rate = args.rate or rate
        names = [m for m in PER_STEP if m == "ddp" or m in args.methods]
        per_step = {m: self.run(m, 1, WARM + (8 if m == "ddp" else SETTLED), rate)[0] for m in names}
        print(
            json.dumps({
                "what": "link", "model": args.model, "compute_s": compute, "rate": round(rate),
                "ratio": round((per_step["ddp"]["step_s"] - compute) / compute, 2),
            }),
            flush=True,
        )  # fmt: skip
        for seed in args.seeds:
            curve, _ = self.run("ddp", seed, args.steps, 0)
            steps, loss = goal(curve["points"])
            print(json.dumps({"what": "goal", "seed": seed, "steps": steps, "loss": round(loss, 4)}), flush=True)
            for method in names:
                row = curve if method == "ddp" else self.run(method, seed, 2 * steps, 0, loss, steps)[0]
                reached = first_at(row["points"], loss)
                wall = reached and reached * per_step[method]["mean_step_s"]
                self.report(method, seed, steps, row, reached, wall)
            for method in (m for m in args.methods if m in ROUNDS):
                row, seconds = self.run(method, seed, 2 * steps, rate, loss, steps)
                reached = first_at(row["points"], loss)
                self.report(method, seed, steps, row, reached, reached and sum(seconds[:reached]))

    def report(self, method, seed, steps, row, reached, wall):
        at = {point[0]: point[1] for point in row["points"]}
        print(
            json.dumps({
                "what": "to_loss", "model": self.args.model, "method": method, "seed": seed, "goal_steps": steps,
                "steps": reached, "wall_s": wall and round(wall, 2), "loss_at_goal_steps": round(at[steps], 4),
                "bytes_per_step": round(row["bytes"] / row["steps"]),
            }),
            flush=True,
        )  # fmt: skip


def goal(points):
    """The step at which the loss has fallen by less than 1 % in the last tenth of the run for the second time in a row,
    and the loss there."""
    times = 0
    for step, loss in points:
        before = [other for at, other in points if at <= 0.9 * step]
        times = times + 1 if len(before) >= 9 and loss > 0.99 * before[-1] else 0
        if times == 2:
            return step, loss
    return points[-1][0], points[-1][1]


def first_at(points, loss):
    return next((step for step, found in points if found <= loss), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default=str(HERE.parent / "build/release/python"))
    parser.add_argument("--python", default=str(HERE.parent / ".deps/python/bin/python3"))
    parser.add_argument("--data", type=pathlib.Path, default=HERE.parent.parent / "shared/data")
    parser.add_argument("--model", choices=sorted(CASES), default="gpt")
    parser.add_argument("--methods", nargs="*", choices=PER_STEP + ROUNDS, default=PER_STEP + ROUNDS)
    parser.add_argument("--hosts", type=int, choices=(2, 4), default=2, help="hosts, with four ranks together")
    parser.add_argument("--rate", type=float, default=0, help="bits per second of the slow link; 0: by --ratio")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1500, help="most steps until the loss hardly falls")
    parser.add_argument("--evaluate-every", type=int, default=30)
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds")
    parser.add_argument("--ratio", type=float, default=15, help="all-reduce over gloo / computation of a step")
    parser.add_argument("--times", action="store_true", help="only measure the mean time of steps, at --rate")
    parser.add_argument(
        "--delay-ms", type=float, default=0, help="each way between two hosts, for links of up to 100 Mb/s"
    )
    parser.add_argument("--congestion", default="cubic", help="congestion control of TCP: cubic, bbr, reno")
    parser.add_argument("--loss", type=float, default=0, help="with --delay-ms: the share of frames that are lost")
    parser.add_argument("--rounds", type=int, help="only measure rounds of a model with so many parameters, at --rate")
    parser.add_argument("--settle", action="store_true", help="only measure the computation, and print the rate")
    parser.add_argument(
        "--torchft", action="store_true", help="only compare losses with torchft, which is in --package"
    )
    args = parser.parse_args()
    if args.evaluate_every % args.every:
        parser.error("--evaluate-every is no multiple of --every: with 'average', hosts differ between two averages")
    if args.loss and not args.delay_ms or args.delay_ms and args.hosts != 2:
        parser.error("--loss needs --delay-ms, and that two hosts")
    args.data = args.data.resolve()
    host_cluster.enter_sandbox(("ip", "tc"))
    cluster_job.LIMIT_S = 7200
    os.environ.pop("LOCKSTEP_TRANSPORT", None)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, host_cluster.HostCluster(args.hosts, folder, args.congestion))
        if args.delay_ms:
            bench.cluster.delay(2, args.delay_ms / 1000, args.loss)
        if args.times:
            bench.times()
        elif args.rounds:
            bench.rounds(args.rounds, args.rate or 100e6)
        elif args.torchft:
            bench.beside_torchft()
        elif args.settle:
            print(json.dumps(dict(zip(("compute_s", "rate"), bench.settle(), strict=True))))
        else:
            bench.compare()


main()
