"""Each Chinese page says which English pages it is made of, and shows no command or code that they do not show.

README.zh-CN.md and the pages of docs/zh begin with   <!-- translates: PATH [PATH...] @ HASH -->   HASH is the first 12
hex digits of the SHA-256 of these files, one after the other. If they have changed since, that is a warning: bring the
Chinese page up to date; then `lint.py --fix translations` writes the new HASH. A block of C++ or Python has the mark of
a block in one of these files, and the rule docs_code compares it with its source. Every other block equals one in these
files, except comments from a `#` on, which may be translated. A line that begins with ALSO_CALLED has the words that
people search for.
"""

import hashlib
import re

from rules.docs_code import MARK
from source_tree import Finding

HEAD = re.compile(r"^<!-- translates: (?P<paths>\S+(?: \S+)*) @ (?P<hash>\w+) -->$")
ALSO_CALLED = "又名："
LANGUAGES_WITH_MARKS = ("cpp", "c++", "python")
COMMENT = re.compile(r"(?:^|\s)#(?:\s.*)?$")  # not `#SBATCH ...`


def check(tree):
    for page in pages(tree):
        lines = tree.lines(page)
        head = HEAD.match(lines[0]) if lines else None
        if head is None:
            yield Finding(page, 1, "no first line <!-- translates: PATH @ HASH -->")
            continue
        english = head["paths"].split()
        missing = [path for path in english if path not in tree]
        for path in missing:
            yield Finding(page, 1, f"{path} does not exist")
        if missing:
            continue
        if head["hash"] != hash_of(tree, english):
            text = f"{' or '.join(english)} has changed: bring this page up to date, then lint.py --fix translations"
            yield Finding(page, 1, text, warning=True)
        if not any(line.startswith(ALSO_CALLED) for line in lines):
            yield Finding(page, 1, f"no line {ALSO_CALLED}")
        shown = {block.content for path in english for block in blocks(tree.lines(path))}
        for block in blocks(lines):
            if block.content not in shown:
                yield Finding(page, block.line, f"{' and '.join(english)} have no such block")


def fixed(tree):
    """Returns path -> updated text of the pages whose hash is not that of the English pages."""
    updated = {}
    for page in pages(tree):
        first, _, rest = tree.text(page).partition("\n")
        head = HEAD.match(first)
        english = head["paths"].split() if head else []
        if not english or any(path not in tree for path in english):
            continue
        now = hash_of(tree, english)
        if head["hash"] != now:
            updated[page] = f"<!-- translates: {head['paths']} @ {now} -->\n{rest}"
    return updated


def pages(tree):
    return [path for path in tree.paths(ends=(".md",)) if path == "README.zh-CN.md" or path.startswith("docs/zh/")]


def hash_of(tree, paths):
    return hashlib.sha256("".join(map(tree.text, paths)).encode()).hexdigest()[:12]


class Block:
    """A block between fences that begins in line `line`. `content`, for comparisons: the mark above a block of C++ or
    Python, otherwise the lines without comments."""

    def __init__(self, lines, start, end):
        self.line = start + 1
        mark = MARK.match(lines[start - 1].strip()) if start else None
        if lines[start].strip().strip("`").startswith(LANGUAGES_WITH_MARKS):
            self.content = mark.group() if mark else None
        else:
            code = [COMMENT.sub("", line).rstrip() for line in lines[start + 1 : end]]
            self.content = tuple(line for line in code if line)


def blocks(lines):
    start = None
    for index, line in enumerate(lines):
        if not line.strip().startswith("```"):
            continue
        if start is None:
            start = index
        else:
            yield Block(lines, start, index)
            start = None


ENGLISH = (
    "<!-- run: a.py#one -->\n```python\nx = 1\n```\n"
    "```\nlockstep run ./a      # starts it\n# then\n#SBATCH --nodes=2\nop=all_reduce#1\n```\n"
)
SAMPLE_HASH = hashlib.sha256(ENGLISH.encode()).hexdigest()[:12]
SAMPLE = {
    "docs/a.md": ENGLISH,
    "docs/b.md": "English\n",
    "docs/zh/a.md": f"<!-- translates: docs/a.md @ {SAMPLE_HASH} -->\n{ALSO_CALLED}a\n"
    "<!-- run: a.py#one -->\n```python\nx = 1\n```\n"
    "```\nlockstep run ./a  # 启动\n# 然后\n\n#SBATCH --nodes=2\nop=all_reduce#1\n```\n"
    "<!-- run: a.py#two -->\n```python @flag\nx = 1\n```\n"
    "```python @flag\nx = 1\n```\n"
    "```console @flag\nlockstep run ./a\n```\n"
    "``` @flag\nlockstep run ./a\n#SBATCH --nodes=3\nop=all_reduce#1\n```\n"
    "``` @flag\nlockstep run ./a\n#SBATCH --nodes=2\nop=all_reduce#2\n```\n",
    "docs/zh/b.md": f"<!-- translates: docs/a.md docs/b.md @ {SAMPLE_HASH} --> @flag\n{ALSO_CALLED}b\n",
    "docs/zh/c.md": f"<!-- translates: docs/c.md @ {SAMPLE_HASH} --> @flag\n{ALSO_CALLED}c\n",
    "docs/zh/d.md": "# 标题 @flag\n",
    "README.zh-CN.md": f"<!-- translates: docs/a.md @ {SAMPLE_HASH} --> @flag\n",
}
