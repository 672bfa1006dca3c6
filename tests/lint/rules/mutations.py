"""Every bug in tests/mutations still matches the code, so that scripts/mutate.py can insert it; and the test cases that
should catch it exist. With --build, so do its targets, and, with --all-parts, its tests."""

import fnmatch
import os
import re
import sys
import types

from source_tree import Finding

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../scripts"))

import mutate  # noqa: E402

FOLDER = "tests/mutations/"
CASE = re.compile(r"^\s*TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", re.M)


def check(tree):
    cases = {".".join(case) for path in tree.cpp("tests") for case in CASE.findall(tree.text(path))}
    for path in tree.paths("tests", ends=(".toml",)):
        if not path.startswith(FOLDER):
            continue
        try:
            mutations = mutate.parse(tree.text(path))
        except ValueError as error:
            yield Finding(path, 1, str(error))
            continue
        lines = tree.lines(path)
        for mutation in mutations:
            line = next(
                number for number, text in enumerate(lines, start=1) if text.split(" #")[0] == f"[{mutation.name}]"
            )
            if mutation.file not in tree:
                yield Finding(path, line, f"{mutation.file} does not exist")
                continue
            try:
                mutation.applied_to(tree.text(mutation.file))
            except ValueError as error:
                yield Finding(path, line, str(error))
            for fault in missing_tests(mutation, cases, tree.build):
                yield Finding(path, line, fault)


def missing_tests(mutation, cases, build):
    """Yields what `mutation` names although neither the sources nor the build have it."""
    for pattern in filter(None, mutation.cases.split(":")):
        # A case with a parameter is called Prefix/Suite.Name/0.
        if not fnmatch.filter(cases, re.sub(r"^\w+/", "", pattern)):
            yield f"no test case matches {pattern}"
    if build is None or not build.has_all_parts:
        return
    for target in mutation.targets:
        if target not in build.targets:
            yield f"no target {target}"
    if not any(re.search(mutation.tests, test) for test in build.tests):
        yield f"no test matches {mutation.tests}"


CODE = """int twice(int x) { return x +  // a comment
                        x; }
int thrice(int x) { return x + x + x; }
struct Outer {
  explicit Outer(int x) : x_{x} { use("a"
                                      "b"); }
  int get() const { return x_; }
  int x_;
};
enum class Color { kRed, kBlue };
int Outer::other() const { return x_; }
"""


def table(name, mark, **keys):
    keys = {"bug": "b", "file": "lockstep/base/a.cc", "new": "0", "targets": ["t"], "tests": "^t$", **keys}
    return f"[{name}]{mark}\n" + "".join(f"{key} = {value!r}\n" for key, value in keys.items())


SAMPLE_BUILD = types.SimpleNamespace(has_all_parts=True, targets={"t"}, tests={"t"})
SAMPLE = {
    "lockstep/base/a.cc": CODE,
    "tests/unit/base/a_test.cc": "TEST(Suite, Case) {}\nTEST_P(\n    Other, Name) {}\n",
    "tests/mutations/base.toml": "".join(
        [
            table("fits", "", function="twice", old="x+x"),
            table("twice_there", " # @flag", function="thrice", old="x +"),
            table("not_there", " # @flag", function="twice", old="y"),
            table("no_such_function", " # @flag", function="four_times", old="x"),
            table("no_such_file", " # @flag", file="lockstep/base/b.cc", old="x"),
            table("a_whole_string_over_two_lines", "", function="Outer::Outer", old='use("ab")'),
            "[a_part_of_a_string]\nin_string = true\n" + table("x", "", old="ab").split("\n", 1)[1],
            table("inside_a_class", "", function="Outer::get", old="x_"),
            table("outside_its_class", "", function="Outer::other", old="x_"),
            table("an_enum", "", function="Color", old="kBlue"),
            table("cases_exist", "", function="Color", old="kBlue", cases="Suite.*:All/Other.Name*"),
            table("a_case_does_not", " # @flag", function="Color", old="kBlue", cases="Suite.*:Suite.Name"),
            table("no_such_target", " # @flag", function="Color", old="kBlue", targets=["u"]),
            table("no_such_test", " # @flag", function="Color", old="kBlue", tests="^u"),
        ]
    ),
    "tests/mutations/broken.toml": "[a] # @flag\nbug = 'x'\n",
}
