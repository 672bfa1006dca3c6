"""What the pages for contributors name exists: each `path` in them; and, in a row or a sentence that puts a `symbol()`
or `Class::member` beside a file, that symbol in it. A path is complete, or below lockstep/, or the end of one; in it,
NAME, Name, MODULE and FILE stand for any text."""

import re

from source_tree import FOLDERS, Finding

PAGES = ("CONTRIBUTING.md", "tests/README.md", "docs/internals/")
ENDS = ("cc", "h", "py", "pyi", "md", "txt", "toml", "sh", "cmake", "bash", "dict", "yml", "in")
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(
    r"(?:[\w.{},*-]+/)*[\w.{},*-]+\.(?:\{[\w,]+\}|" + "|".join(ENDS) + r")(?:#L?\w+)?|(?:[\w.-]+/)+(?:[\w.*-]+)?"
)
SYMBOL = re.compile(r"(?!std::)(?:(?:\w+::)*~?\w+(?:::operator)?\(\)|(?:\w+::)+\w+)")
IN_FILE = re.compile(r"`(?P<symbol>[^`\n]+)`(?:,| is| are)? (?:in|\()\s*`(?P<path>[^`\n]+)`")
PLACEHOLDER = re.compile(r"NAME|Name|MODULE|FILE|\.\.\.|\*|<")
README = "tests/README.md"
SHARDS = re.compile(r"^SHARDS := ((?:.*\\\n)*.*)$", re.M)
HEADING = re.compile(r"\bfiles?\b")


def check(tree):
    known = Known(tree)
    for page in tree.paths(ends=(".md",)):
        if page.startswith(PAGES):
            yield from check_page(known, page, tree.lines(page))
    shards = SHARDS.search(tree.text("Makefile"))
    for shard in shards.group(1).replace("\\\n", " ").split():
        if not any(f"`{shard}`" in line.split("|")[1] for line in tree.lines(README) if line.count("|") > 2):
            yield Finding(README, 1, f"the shard {shard} of the Makefile is missing")


def check_page(known, page, lines):
    columns, fence = None, False
    for number, line in enumerate(lines, start=1):
        fence ^= line.startswith("```")
        if fence:
            continue
        for text in QUOTED.findall(line):
            if is_path(text) and not known.files(text):
                yield Finding(page, number, f"`{text}` does not exist")
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else None
        if cells is None:
            columns = None
            pairs = [(match.group("symbol"), [match.group("path")]) for match in IN_FILE.finditer(line)]
        elif columns is None:
            columns = cells
            continue
        else:
            pairs = list(pairs_of_row(columns, cells))
        for symbol, paths in pairs:
            files = {file for path in paths for file in known.files(path)}
            if SYMBOL.fullmatch(symbol) and files and not known.has(symbol, files):
                yield Finding(page, number, f"`{symbol}` is not in {', '.join(paths)}")


def is_path(text):
    """Whether it is a path of this repository: not the name of a test, a header of torch, or what a build makes."""
    has_file = "." in text.rsplit("/", 1)[-1]
    is_ours = text.split("/")[0] in FOLDERS or text.endswith("/") or (has_file and not text.startswith("torch/"))
    return is_ours and PATH.fullmatch(text) and not text.startswith(("build/", ".deps/", "mnist/"))


def pairs_of_row(columns, cells):
    """Yields pairs of a symbol and the paths in the columns that have "file" as their heading."""
    paths = []
    for heading, cell in zip(columns, cells):
        if HEADING.search(heading):
            paths += [text for text in QUOTED.findall(cell) if is_path(text)]
    for heading, cell in zip(columns, cells):
        if paths and not HEADING.search(heading):
            yield from ((text, paths) for text in QUOTED.findall(cell))


class Known:
    def __init__(self, tree):
        self._tree = tree
        self._all = list(tree.paths())
        self._folders = {path.rsplit("/", depth)[0] for path in self._all for depth in range(1, path.count("/") + 1)}

    def files(self, text):
        """The files that a path in a page means; for a folder, and for a path with a placeholder, any text."""
        if PLACEHOLDER.search(text):
            return [text]
        text = text.split("#")[0].removeprefix("../")
        if text.rstrip("/") in self._folders or any(
            ("/" + folder).endswith("/" + text.rstrip("/")) for folder in self._folders
        ):
            return [text]
        found = []
        for name in expanded(text):
            matches = [path for path in self._all if ("/" + path).endswith("/" + name)]
            if not matches:
                return []
            found += matches
        return found

    def has(self, symbol, files):
        """Whether one of the files has the last part of the symbol, or one is a folder or has a placeholder."""
        word = re.compile(r"\b" + re.escape(symbol.removesuffix("()").split("::")[-1]) + r"\b")
        return any(file not in self._tree or word.search(self._tree.text(file)) for file in files)


def expanded(text):
    """a.{h,cc} is a.h and a.cc."""
    match = re.search(r"\{([^}]*)\}", text)
    return [text[: match.start()] + end + text[match.end() :] for end in match.group(1).split(",")] if match else [text]


SAMPLE = {
    "lockstep/a/b.cc": "void A::add() {}\n",
    "lockstep/a/b.h": "class A { void add(); };\n",
    "docs/internals/c.md": "`a/b.cc` and `b.{h,cc}` and `lockstep/a/` and `a/NAME.cc` and `A::add()` in `a/b.cc`\n"
    "`a/c.cc` @flag\n"
    "`lockstep/b/` @flag\n"
    "`b.{h,py}` @flag\n"
    "`A::remove()` in `a/b.cc` @flag\n"
    "\n"
    "| function | file |\n|---|---|\n"
    "| `A::add` | `a/b.h` |\n"
    "| `remove()` | `b.h` | @flag\n",
    "Makefile": "SHARDS := one \\\n  two\n",
    README: "The shard `one` @flag\n",
    "docs/other.md": "`a/c.cc`\n",
}
