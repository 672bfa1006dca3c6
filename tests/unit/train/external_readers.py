"""Reads the files that the loggers and the report write with the programs that users read them with.

Usage: external_readers.py CASE SAMPLES DEPS. SAMPLES is the program unit_train_sample_writer. The exit code is 77 if a
program that CASE requires is not installed.
"""

import csv
import html
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

SKIPPED = 77


def check(got, want, what):
    """Exits with an error unless `got` equals `want`."""
    if got != want:
        sys.exit(f"{what}: got {got!r}, want {want!r}")


def tensorboard(samples, deps, folder):
    """Reads event files with TensorBoard's Python reader and with its server, over the HTTP API of its page."""
    python = deps / "tensorboard/bin/python"
    if not python.exists():
        sys.exit(SKIPPED)
    subprocess.run([samples, "values", folder], check=True)
    script = pathlib.Path(__file__).with_name("read_tensorboard_events.py")
    sys.exit(subprocess.run([python, "-W", "ignore", script, folder]).returncode)


def tables(samples, _, folder):
    """Reads tables with the csv and json modules of Python."""
    subprocess.run([samples, "values", folder], check=True)
    with open(pathlib.Path(folder) / "metrics.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file, strict=True, restkey="too many", restval="too few"))
    check([row["step"] for row in rows], [str(step) for step in range(12)], "steps of the table")
    check(list(rows[0])[:4], ["step", "time", "train/loss", "learning rate"], "columns")
    check([float(row["train/loss"]) for row in rows[:10]], [10, 9, 8, 7, 6, 5, 106, 107, 108, 109], "losses")
    check(rows[0]["learning rate"], "", "a value without a column at first")
    check(rows[10]['a,"b"'], "inf", "infinity")
    check(math.isnan(float(rows[10]["odd"])), True, "a NaN")
    check(float(rows[11]["tiny"]), 1e-310, "a small number")
    check([row for row in rows if "too many" in row or "too few" in row.values()], [], "rows of another length")

    def reject(name):
        raise ValueError(f"{name} is not JSON")

    with open(pathlib.Path(folder) / "metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line, parse_constant=reject) for line in file]
    check([line["step"] for line in lines], [*range(12), 3, 4, 5], "steps of the lines")
    check(lines[9]["train/loss"], 109, "a loss")
    check(lines[10]["odd"], "NaN", "a NaN")
    check(lines[10]["bad \ufffd utf-8"], "-Infinity", "an infinity")
    check(lines[12]["text"], {"sample": "first line\nsecond: \u2713 \ufffd <b>"}, "the text")
    check(lines[13]["histogram"]["fc.weight"]["nan"], 1, "NaN in a histogram")
    check(sum(lines[13]["histogram"]["fc.weight"]["counts"]), 1000, "numbers in a histogram")


def report(samples, _, folder):
    """Parses the report as XML: it is well-formed, user text is escaped, and it loads nothing."""
    subprocess.run([samples, "report", folder], check=True)
    text = (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")
    check(len(text) < 600_000, True, f"the report has {len(text)} bytes; expected less than 600000")
    tree = xml.etree.ElementTree.fromstring(text)
    tags = {element.tag.split("}")[1] for element in tree.iter()}
    check(tags & {"script", "img", "link", "iframe", "object"}, set(), "elements that load or run something")
    check(tree.findtext(".//{*}h1"), "char-gpt <script>document.title='broken'</script>", "the title")
    for element in tree.iter():
        for name, value in element.attrib.items():
            check(name in ("href", "src") or "url(" in value, False, f"{element.tag} {name}={value}")
            if name in ("d", "x", "y", "width", "height", "cx", "cy", "style") and re.search("nan|inf", value):
                sys.exit(f"{element.tag} {name}={value[:80]} has no position")
    titles = [element.text for element in tree.iter() if element.tag.endswith("}h2")]
    check(titles[:3], ["loss", "learning rate", "throughput/samples_per_second"], "charts")
    check(
        {"step time, ms", "CPU use, cores", "memory, MiB", "ranks"} <= set(titles),
        True,
        f"charts of ranks in {titles}",
    )
    rows = [element for element in tree.iter() if element.tag.endswith("}tr")]
    check(len(rows), 5, "rows of the table")


def browser(samples, _, folder):
    """Renders the report in a headless browser, in light and dark mode, in the sizes of a phone and a desktop.

    The page has no script: the test adds one that replaces the page by its measurements.
    """
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        sys.exit(SKIPPED)
    subprocess.run([samples, "report", folder], check=True)
    text = (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")
    measuring_script = """<script>//<![CDATA[
      const rightEdge = e => e.getBoundingClientRect().right;
      const outside = e => !e.closest(".scroll") && !e.closest("svg") && rightEdge(e) > innerWidth + 1;
      const wide = [...document.querySelectorAll("main *, h1, dl")].filter(outside);
      const heights = [...document.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height);
      const lefts = [...document.querySelectorAll("section")].map(e => Math.round(e.getBoundingClientRect().left));
      document.body.innerHTML = "<pre>" + JSON.stringify({
        scripts: document.scripts.length, images: document.images.length,
        title: document.querySelector("h1").textContent,
        drawings: document.querySelectorAll("svg").length, wide: wide.map(e => e.tagName + "." + e.className),
        page: document.documentElement.scrollWidth, width: innerWidth,
        small: Math.min(...heights.filter(h => h > 0)),
        back: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color,
        columns: new Set(lefts).size}) + "</pre>";
    //]]></script></body>"""
    page = pathlib.Path(folder) / "measured.html"
    page.write_text(text.replace("</body>", measuring_script), encoding="utf-8")
    for width, columns in ((360, 1), (1200, 3)):
        for scheme, back in ((1, "rgb(246, 247, 249)"), (0, "rgb(18, 22, 28)")):  # Chromium uses 0 for dark
            command = [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},800",
                f"--blink-settings=preferredColorScheme={scheme}",
                "--virtual-time-budget=2000",
                "--dump-dom",
                page.as_uri(),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            found = re.search("<pre>(.*)</pre>", done.stdout)
            if not found:
                sys.exit(f"the browser exited with {done.returncode}: {done.stderr[-2000:]}")
            measured = json.loads(html.unescape(found.group(1)))
            what = f"at {width} pixels, scheme {scheme}: "
            check(measured["scripts"], 1, what + "scripts, including the added one")
            check(measured["images"], 0, what + "images")
            check(measured["title"], "char-gpt <script>document.title='broken'</script>", what + "the title")
            check(measured["drawings"] >= 12, True, what + f"{measured['drawings']} charts")
            check(
                (measured["width"], measured["wide"], measured["page"] <= measured["width"]),
                (width, [], True),
                what + "elements wider than the page",
            )
            check(measured["small"] >= 9, True, what + f"height of the smallest text, {measured['small']}")
            check(measured["back"], back, what + "the background")
            check(measured["columns"], columns, what + "columns")


def trace(samples, _, folder):
    """Checks the trace: complete events, no overlapping spans in a track, all ranks on one time axis."""
    subprocess.run([samples, "trace", folder], check=True)
    with open(pathlib.Path(folder) / "trace.json", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    check(
        names,
        {0: "rank 0 on alpha", 1: "rank 1 on alpha", 2: "rank 2 on beta.example.org", 3: "rank 3 on beta.example.org"},
        "processes",
    )
    spans = [event for event in events if event["ph"] == "X"]
    check(len(spans), 4 * 32 * (1 + 4 + 3), "spans")
    check(min(event["ts"] for event in spans), 0, "the first time")
    tracks = {}
    for event in spans:
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for track, times in tracks.items():
        times.sort()
        for (_, end), (begin, _) in zip(times, times[1:]):
            check(begin >= end - 0.002, True, f"spans of track {track} that overlap at {begin}")
    ends = {
        rank: [e["ts"] + e["dur"] for e in spans if e["pid"] == rank and e["name"] == "step 2990"][0] for rank in names
    }
    check(max(ends.values()) - min(ends.values()) < 1000, True, f"ends of one step, of clocks an hour apart: {ends}")


if __name__ == "__main__":
    case, program, deps_folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        {function.__name__: function for function in (tensorboard, tables, report, browser, trace)}[case](
            program, pathlib.Path(deps_folder), os.path.join(work, "runs/x")
        )
