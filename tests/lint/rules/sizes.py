"""Warns of a file of more than 500 lines, a function of more than 60, and a folder of lockstep/ or tests/ with more
than 30 files, sub-folders not counted; tests/mutations and fuzz corpora are excepted. Split files by topic, not by
size."""

import re

from source_tree import Finding, without_comments_and_strings

MAX_FILE = 500
MAX_FUNCTION = 60
MAX_FOLDER = 30
PREPROCESSOR = re.compile(r"(?m)^[ \t]*#(?:.*\\\n)*.*")
SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum)\b|\bextern\b")


def check(tree):
    for path in tree.paths(ends=(".h", ".cc", ".py", ".sh", ".cmake")):
        num_lines = len(tree.lines(path))
        if num_lines > MAX_FILE:
            yield warning(path, 1, f"{num_lines} lines; are these several topics?")
    for path in tree.cpp():
        for first, last in functions(tree.text(path)):
            if last - first + 1 > MAX_FUNCTION:
                yield warning(path, first, f"a function of {last - first + 1} lines; does it do several things?")
    folders = {}
    for path in tree.paths("lockstep", "tests"):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    for folder, paths in folders.items():
        if len(paths) > MAX_FOLDER and folder != "tests/mutations" and not folder.startswith("tests/fuzz/corpus/"):
            yield warning(paths[0], 1, f"{folder} has {len(paths)} files; are these several modules?")


def warning(path, line, text):
    return Finding(path, line, text, warning=True)


def functions(text):
    """Yields the first and last lines of function bodies: outermost blocks that are not a namespace, a type or the
    values of a table."""
    code = without_comments_and_strings(PREPROCESSOR.sub(keep_lines, text))
    line, head, scopes, depth, first, is_table = 1, "", [], 0, 0, False
    for char in code:
        if char == "\n":
            line += 1
        if depth:  # inside a function
            depth += (char == "{") - (char == "}")
            if depth == 0 and not is_table:
                yield first, line
            if depth == 0:
                head = ""
        elif char == "{":
            if is_scope(head):
                scopes.append(head)
            else:
                depth, first, is_table = 1, line, head.rstrip().endswith("=")
            head = ""
        elif char in ";}":
            head = ""
        else:
            head += char


def keep_lines(match):
    return "\n" * match.group().count("\n")


def is_scope(head):
    """Returns whether the text before a brace opens a namespace or a type. Ignores the rare `struct X f() {`."""
    head = re.sub(r"template\s*<[^{}]*?>\s*(?=\w)", "", head)
    return bool(SCOPE.search(head)) and not re.search(r"\)\s*(?:const|noexcept|override|final|->.*)?\s*$", head)


LONG_BODY = "  int x;\n" * 59
SAMPLE = {
    **{f"lockstep/job/f{number:02}.h": "int a;" + " @flag" * (number == 0) + "\n" for number in range(31)},
    **{f"tests/fuzz/corpus/a/f{number:02}.txt": "a\n" for number in range(31)},
    "lockstep/base/long.cc": "int a; @flag\n" + "\n" * 500,
    "lockstep/base/fits.cc": "int a;\n" * 350,
    "lockstep/base/functions.cc": "namespace a {\n#define X(a) \\\n  do { \\\n  } while (0)\nstruct S {\n"
    "  S() : x_(0) { @flag\n" + LONG_BODY + "  }\n"
    "  int f() const {\n" + LONG_BODY[9:] + "  }\n};\n"
    "template <class T>\nvoid g(T t) { @flag\n" + LONG_BODY + "}\n"
    "enum class E { kA };\n"
    "const int kTable[] = {\n" + LONG_BODY + "};\n"
    'void h() {\n  auto s = "}";  // }\n' + LONG_BODY[18:] + "}\n}\n",
}
