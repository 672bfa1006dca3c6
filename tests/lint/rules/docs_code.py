"""Each block of C++ in the docs is code that the build compiles, and each block of Python is code that a test runs.

Above each ```cpp block there is a line   <!-- compiled: PATH -->   or   <!-- compiled: PATH#NAME -->, and above each
```python block   <!-- run: PATH -->   or   <!-- run: PATH#NAME -->. The block equals that file, or its regions between
lines `// docs: begin NAME` and `// docs: end NAME`, in Python `# docs: ...` (several regions are concatenated, and
their common indentation is removed). With --build, the build must compile a file of C++.
"""

import re
import textwrap

from source_tree import Finding

MARK = re.compile(r"^<!-- (?:compiled|run): (?P<path>[^\s#]+)(?:#(?P<region>[\w-]+))? -->$")
EDGE = re.compile(r"^\s*(//|#) docs: (begin|end) [\w-]+$")


def check(tree):
    for path in tree.paths(ends=(".md",)):
        lines = tree.lines(path)
        for start, end in blocks(lines):
            mark = MARK.match(lines[start - 1].strip()) if start else None
            if mark is None:
                yield Finding(path, start + 1, "no line <!-- compiled: PATH#NAME --> (Python: run) above this block")
                continue
            fault = compare(tree, mark, lines[start + 1 : end])
            if fault:
                yield Finding(path, start + 1, fault)


def fixed(tree):
    """Returns path -> updated text of the pages whose blocks differ from their sources."""
    pages = {}
    for path in tree.paths(ends=(".md",)):
        lines = tree.lines(path)
        for start, end in reversed(list(blocks(lines))):
            mark = MARK.match(lines[start - 1].strip()) if start else None
            source = mark.group("path") if mark else None
            wanted = region(tree.lines(source), mark.group("region")) if source in tree else None
            if wanted is not None:
                lines[start + 1 : end] = wanted
        text = "\n".join(lines) + "\n"
        if text != tree.text(path):
            pages[path] = text
    return pages


def blocks(lines):
    """Yields the line indices of the fences around each block of C++ or Python."""
    start = None
    for index, line in enumerate(lines):
        if start is None and re.match(r"^```(?:cpp|c\+\+|python)\b", line):
            start = index
        elif start is not None and line.startswith("```"):
            yield start, index
            start = None


def compare(tree, mark, shown):
    source = mark.group("path")
    if source not in tree:
        return f"{source} does not exist"
    if (
        tree.build is not None
        and not source.endswith((".h", ".py"))
        and not any(file.endswith("/" + source) for file in tree.build.compiled_files)
    ):
        return f"{source} is not compiled by this build"
    wanted = region(tree.lines(source), mark.group("region"))
    if wanted is None:
        return (
            f"{source} has no lines '// docs: begin {mark.group('region')}' and '// docs: end {mark.group('region')}'"
        )
    for index in range(max(len(wanted), len(shown))):
        want = wanted[index] if index < len(wanted) else "(end)"
        have = shown[index] if index < len(shown) else "(end)"
        if want.rstrip() != have.rstrip():
            return f"line {index + 1} of the block is '{have.strip()}', but {source} has '{want.strip()}'"
    return None


def region(lines, name):
    """Returns the lines of the region `name`, or all lines without a name; None if the marks are not in pairs."""
    if name is None:
        return [line for line in lines if not EDGE.match(line)]
    kept, inside, found = [], False, False
    for line in lines:
        edge = line.strip().removeprefix("//").removeprefix("#")
        if edge == f" docs: begin {name}":
            if inside:
                return None
            inside = found = True
        elif edge == f" docs: end {name}":
            if not inside:
                return None
            inside = False
        elif inside and not EDGE.match(line):
            kept.append(line)
    return textwrap.dedent("\n".join(kept)).split("\n") if found and not inside else None


SAMPLE = {
    "examples/01/main.cc": "int a;\n// docs: begin two\n  int b;\n// docs: end two\nint c;\n  // docs: begin two\n"
    "    int d;\n  // docs: end two\n// docs: begin open\n",
    "docs/01.md": "<!-- compiled: examples/01/main.cc#two -->\n```cpp\nint b;\n  int d;\n```\n"
    "```cpp @flag\nint b;\n```\n"
    "<!-- compiled: examples/01/main.cc#two -->\n```cpp @flag\nint b;\n```\n"
    "<!-- compiled: examples/01/main.cc#open -->\n```cpp @flag\n```\n"
    "<!-- compiled: examples/02/main.cc -->\n```cpp @flag\n```\n"
    "<!-- compiled: examples/01/main.cc#none -->\n```cpp @flag\n```\n"
    "```python @flag\nimport torch\n```\n"
    "<!-- run: examples/03/main.py#one -->\n```python\nx = 1\n```\n",
    "examples/03/main.py": "# docs: begin one\nx = 1\n# docs: end one\n",
}
