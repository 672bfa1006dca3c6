#!/usr/bin/env python3
"""Builds the documentation site and tests it: links and anchors, nothing from the network, search, and a phone.

Usage: site_test.py FOLDER, which is replaced. Exits with 77, which means skipped, without .deps/site or a Chromium:
`scripts/setup.sh --test-tools` installs both.
"""

import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

from browser import Browser

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# What people type into the search, and a page that must be among the first three results. A page has one row for each
# word that it should be found by.
SEARCHES = (
    ("desync", "docs/guide/04-errors"),
    ("slurm", "docs/how-to/slurm"),
    ("horovod", "docs/how-to/horovod"),
    ("DistributedDataParallel", "docs/guide/08-python"),
    ("checkpoint", "docs/guide/06-checkpoints"),
    ("bfloat16", "docs/how-to/mixed-precision"),
    ("cuda graphs", "docs/how-to/cuda-graphs"),
    ("LOCKSTEP_TIMEOUT", "docs/reference/environment"),
    ("kubernetes", "docs/how-to/kubernetes"),
    ("learning rate schedule", "docs/how-to/schedules-clipping-averages"),
    ("梯度同步", "docs/zh/how-a-step-works"),
    ("多机训练", "docs/zh/several-hosts"),
    ("千兆网", "docs/zh/several-hosts"),
    ("断点续训", "docs/zh/quickstart"),
    ("卡死", "docs/zh/when-it-hangs"),
    ("坑", "docs/zh/ddp-pitfalls"),
    ("显存", "docs/zh/ddp-pitfalls"),
    ("Horovod 迁移", "docs/zh/migrate"),
    ("看懂错误", "docs/zh/errors"),
    ("五分钟上手", "docs/zh/quickstart"),
)
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}


class Page(html.parser.HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if values.get(LOADED.get(tag)):
            self.loaded.append(values[LOADED[tag]])


def build(folder):
    """Builds the site in FOLDER/site."""
    shutil.rmtree(folder, ignore_errors=True)
    source, site = folder / "source", folder / "site"
    source.mkdir(parents=True)
    command = [ROOT / ".deps/site/bin/sphinx-build", "-q", "-W", "--keep-going", "-j", "auto", "-c", ROOT / "docs/site"]
    subprocess.run([*command, "-d", folder / "doctrees", source, site], check=True)
    return site


def check_links(site):
    """Yields the links of all pages, and of llms.txt, that lead nowhere, and what pages would load from the network."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded or parts.scheme not in ("http", "https", "mailto"):
                    yield f"{path.relative_to(site)}: {link} is not a file of the site"
                continue
            target = (
                pathlib.Path(os.path.normpath(path.parent / urllib.parse.unquote(parts.path))) if parts.path else path
            )
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link} does not exist"
            elif (
                parts.fragment
                and target in pages
                and urllib.parse.unquote(parts.fragment) not in pages[target].anchors | {""}
            ):
                yield f"{path.relative_to(site)}: {link}: the page has no such anchor"
    for style in site.rglob("*.css"):
        for address in re.findall(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]*)""", style.read_text()):
            yield f"{style.relative_to(site)}: {address}"
    for link in re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text()):
        if not (site / link).is_file() or not (ROOT / link).is_file():
            yield f"llms.txt: {link} does not exist"
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links")


def check_pages(site, browser):
    """Yields the pages that are wider than a phone or another screen, or that are not dark where the user wants it."""
    for path in sorted(site.rglob("*.html")):
        for width, scheme in ((360, "light"), (1400, "dark")):
            browser.set_screen(width, 800, scheme)
            browser.open(path.as_uri())
            needed, brightness = browser.evaluate("""(() => {
              const content = [document.documentElement, document.querySelector(".content")];
              const color = getComputedStyle(document.body).backgroundColor.match(/\\d+/g);
              return [Math.max(...content.map(e => e?.scrollWidth ?? 0)), +color[0]];
            })()""")
            if needed > width:
                yield f"{path.relative_to(site)} is wider than {width} pixels"
            if (brightness > 128) != (scheme == "light"):
                yield f"{path.relative_to(site)} is not {scheme}: its background is {brightness}"


def check_searches(site, browser):
    for words, page in SEARCHES:
        browser.open(f"{(site / 'search.html').as_uri()}?q={urllib.parse.quote(words)}")
        found = browser.evaluate("""new Promise(resolve => {
          const end = Date.now() + 10000;
          const wait = () => document.querySelector(".search-summary")?.innerText || Date.now() > end
            ? resolve([...document.querySelectorAll("ul.search a")].map(a => a.getAttribute("href")))
            : setTimeout(wait, 20);
          wait();
        })""")
        pages = [link.split("#")[0] for link in found[:3]]
        if page.removesuffix(".md") + ".html" not in pages:
            yield f"search for '{words}': {page} is not among the first three of {len(found)} results, {pages}"


def main():
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None or not (ROOT / ".deps/site/lockstep.stamp").exists():
        sys.exit(77)
    site = build(pathlib.Path(sys.argv[1]))
    browser = Browser(program)
    try:
        faults = [*check_links(site), *check_pages(site, browser), *check_searches(site, browser), *browser.problems]
    finally:
        browser.close()
    print("\n".join(faults) or f"{len(SEARCHES)} searches, no fault")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
