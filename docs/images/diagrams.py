#!/usr/bin/env python3
"""Writes the diagrams of the pages, *.svg beside this file. Usage: diagrams.py"""

import html
import pathlib

FONT = "font-family: system-ui, sans-serif; font-size: 14px"
FILLS = {"host": "#f6f8fa", "rank": "#ddf4ff", "launcher": "#fff8c5", "memory": "#dafbe1", "wait": "#ffebe9"}


class Drawing:
    """An SVG picture with boxes, arrows and texts. `\\n` separates the lines of a text."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" style="{FONT}">',
            f"<title>{html.escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="#57606a"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def text(self, x, y, text, anchor="middle", color="#1f2328"):
        lines = text.split("\n")
        for number, line in enumerate(lines):
            height = y + 5 + (number - (len(lines) - 1) / 2) * 18
            self.parts.append(
                f'<text x="{x}" y="{height:g}" text-anchor="{anchor}" fill="{color}">{html.escape(line)}</text>'
            )

    def box(self, x, y, width, height, text="", kind="rank"):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{FILLS[kind]}" stroke="#8c959f"/>'
        )
        if kind == "host":
            self.text(x + 10, y + 14, text, "start", "#57606a")
        else:
            self.text(x + width / 2, y + height / 2, text)

    def arrow(self, *points, text="", both=False, at=None):
        path = " ".join(f"{x} {y}" for x, y in points)
        start = 'marker-start="url(#head)" ' if both else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="#57606a" stroke-width="1.5" {start}marker-end="url(#head)"/>'
        )
        if text:
            (x0, y0), (x1, y1) = points[0], points[-1]
            self.text(*(at or ((x0 + x1) / 2, (y0 + y1) / 2 - 12)), text, color="#57606a")

    def save(self, name):
        pathlib.Path(__file__).with_name(name).write_text("\n".join([*self.parts, "</svg>", ""]))


def who_starts_whom():
    d = Drawing(800, 300, "lockstep run starts one agent on each host, and each agent starts its ranks")
    d.box(300, 14, 200, 48, "lockstep run\n(the launcher)", "launcher")
    for left, host in ((20, "host alpha"), (420, "host beta")):
        d.box(left, 110, 360, 174, host, "host")
        d.box(left + 120, 134, 120, 40, "agent", "launcher")
        d.arrow((400, 62), (left + 180, 134))
        for rank in (0, 1):
            number = rank + (2 if left > 20 else 0)
            d.box(left + 30 + 170 * rank, 222, 130, 44, f"rank {number}\n./train")
            d.arrow((left + 180, 174), (left + 95 + 170 * rank, 222))
    d.text(240, 84, "started by itself", "middle", "#57606a")
    d.text(575, 84, "one ssh connection, or srun", "middle", "#57606a")
    d.save("who-starts-whom.svg")


def one_step():
    d = Drawing(800, 236, "Two ranks in one step: gradients are reduced while backward() goes on")
    for rank in (0, 1):
        y = 30 + 92 * rank
        d.text(14, y + 20, f"rank {rank}", "start")
        longer = 30 * rank
        d.box(80, y, 60, 40, "data")
        d.box(140, y, 150 + longer, 40, "forward")
        d.box(290 + longer, y, 270 + longer, 40, "backward()")
        if rank == 0:
            d.box(560, y, 60, 40, "wait", "wait")
        d.box(620, y, 90, 40, "step()", "memory")
    for x in (420, 490, 560):
        d.arrow((x, 72), (x + 40, 120), both=True)
    d.arrow((80, 200), (740, 200))
    d.text(740, 218, "time", "end", "#57606a")
    d.text(430, 182, "each arrow: one gradient is averaged as soon as both ranks have it", "middle", "#57606a")
    d.save("one-step.svg")


def shared_parameters():
    d = Drawing(800, 262, "Ranks of one host share the parameters and the optimizer's state")
    d.box(14, 12, 772, 238, "one host", "host")
    for rank in (0, 1, 2):
        d.box(40 + 250 * rank, 40, 220, 56, f"rank {rank}\nits own gradients")
        d.arrow((150 + 250 * rank, 96), (150 + 250 * rank, 170), text="1/3 of the work", at=(218 + 250 * rank, 132))
    d.box(
        40,
        170,
        720,
        60,
        "one copy of the parameters and of the optimizer's state, in shared memory:\n"
        "step() adds the gradients of all ranks and updates, in one pass",
        "memory",
    )
    d.save("shared-parameters.svg")


def bytes_between_hosts():
    d = Drawing(800, 330, "A ring over all ranks beside one exchange for each host")
    for top, title, amount in (
        (10, "a ring over all ranks, in an order that alternates between hosts", "3 N out of each host"),
        (172, "Lockstep: added in shared memory first", "N out of each host\nbfloat16: N / 2"),
    ):
        d.text(14, top + 12, title, "start")
        is_ring = top < 100
        for host in (0, 1):
            left, ranks, total = 14 + 470 * host, 34 + 590 * host, 204 + 300 * host
            d.box(left, top + 28, 300, 116, "host " + "alpha beta".split()[host], "host")
            for rank in (0, 1):
                number = 2 * rank + host if is_ring else 2 * host + rank
                d.box(ranks, top + 52 + 44 * rank, 120, 36, f"rank {number}")
            if not is_ring:
                d.box(total, top + 70, 90, 44, "sum", "memory")
                for rank in (0, 1):
                    ends = (ranks + 120, total) if host == 0 else (ranks, total + 90)
                    d.arrow((ends[0], top + 70 + 44 * rank), (ends[1], top + 92), both=True)
        for y in (62, 80, 106, 124) if is_ring else (92,):
            d.arrow((154 if is_ring else 294, top + y), (624 if is_ring else 504, top + y), both=True)
        d.text(399, top + (44 if is_ring else 132), amount, "middle", "#57606a")
    d.save("bytes-between-hosts.svg")


def which_way_in():
    d = Drawing(800, 300, "Which way into Lockstep")
    ways = (
        ("I have a script\nof torch.distributed", "lockstep run -n 4 python train.py", "hangs and failures are named"),
        ("and several ranks\nshare a host's CPU", 'init_process_group("lockstep")', "gradients through shared memory"),
        ("I can change\nthe loop", "lockstep.DistributedDataParallel", "no wrapper, exact resume"),
        ("I write C++", "lockstep::DistributedDataParallel, Trainer", "what libtorch lacks"),
    )
    for number, (who, what, gain) in enumerate(ways):
        y = 12 + 71 * number
        d.box(14, y, 180, 56, who, "launcher")
        d.box(236, y, 316, 56, what)
        d.arrow((194, y + 28), (236, y + 28))
        d.text(566, y + 28, gain, "start", "#57606a")
    d.save("which-way-in.svg")


if __name__ == "__main__":
    who_starts_whom()
    one_step()
    shared_parameters()
    bytes_between_hosts()
    which_way_in()
