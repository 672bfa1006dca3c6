"""The documentation describes the present state and does not announce changes: no "yet", "so far" or "today"."""

import re

from source_tree import Finding

WORDS = re.compile(r"\b(?:yet|so\s+far|today|for\s+now)\b", re.I)
# Fenced blocks (to the end of the text if they are not closed), block quotes and code spans quote what programs print.
QUOTED = re.compile(
    r"^[ \t>]*(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t>]*(?P=fence)[`~]*[ \t]*$|\Z)|^[ \t]*>[^\n]*|"
    r"(?P<ticks>`+)(?!`)(?:[^\n]|\n(?![ \t]*\n))+?(?<!`)(?P=ticks)(?!`)",
    re.M | re.S,
)
EXCEPT = ("docs/history/", "CHANGELOG.md")


def check(tree):
    for path in tree.paths(ends=(".md",)):
        if path != "README.md" and not path.startswith("docs/") or path.startswith(EXCEPT):
            continue
        text = QUOTED.sub(lambda match: "x" + "\n" * match.group().count("\n"), tree.text(path))
        for match in WORDS.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            words = " ".join(match.group().split())
            yield Finding(path, line, f"'{words}' in the documentation; say what is, or move it to docs/history/")


SAMPLE = {
    "README.md": "Not yet there. @flag\nYet another one is @flag\nso far @flag\nfar from today's work. @flag\n",
    "docs/guide/01-a.md": """\
Use `yet`, ``for `now` yet`` and `a
today` here, but today @flag
it is so @flag
far, and for @flag
now `x` so.

An odd ` tick, yet @flag

```text
nothing yet
```
> lockstep: nothing so far

1. An item
   ~~~
   today
   ~~~
   for @flag
   now, and yesterday

So it is. Far away, toYetToday.
""",
    "docs/history/a.md": "today\n",
    "docs/unclosed.md": "```\nyet\n",
    "CHANGELOG.md": "today\n",
    "CONTRIBUTING.md": "today\n",
}
