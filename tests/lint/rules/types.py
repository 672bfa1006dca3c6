"""No two types at namespace scope in lockstep/ share a name, so that a name means one thing in the whole project."""

import os
import re
import sys
from typing import NamedTuple

from source_tree import Finding

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../scripts"))

import cpp_text  # noqa: E402

PREPROCESSOR = re.compile(r"(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*")
TYPE_KEYS = ("class", "struct", "union", "enum")


class Definition(NamedTuple):
    name: str
    path: str
    line: int
    alias: tuple  # the tokens of the aliased type; empty for classes, unions and enums


def check(tree):
    first = {}
    for path in tree.cpp("lockstep"):
        for found in definitions(path, tree.text(path)):
            earlier = first.setdefault(found.name, found)
            if earlier is not found and not are_one_type(earlier, found):
                yield Finding(path, found.line, f"type {found.name} is also defined at {earlier.path}:{earlier.line}")


def are_one_type(a, b):
    """Returns whether two definitions of a name are equal aliases, or alternatives of which a build compiles one."""
    if a.alias and a.alias == b.alias:
        return True
    return a.path != b.path and alternative(a.path) == alternative(b.path)


def alternative(path):
    """Returns the same path for nccl.cc and no_nccl.cc."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{name.removeprefix('no_')}"


def definitions(path, text):
    """Yields the types that a file defines at namespace scope. Nested types and specializations are skipped."""
    text = PREPROCESSOR.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    code = cpp_text.tokens(text)
    begin, index = 0, 0  # the tokens of the current declaration are code[begin:index]
    while index < len(code):
        head = code[begin:index]
        word = code[index].text
        if word in (";", "}"):
            found = alias(head) if word == ";" else None
            begin = index + 1
        elif word == "{":
            found = None
            if is_namespace(head):
                begin = index + 1
            elif is_inside(head):
                index = cpp_text.closing(code, index) or len(code)
            else:
                found = type_name(head)
                index = cpp_text.closing(code, index) or len(code)
                begin = index + 1
        else:
            found = None
        if found:
            name, aliased = found
            yield Definition(name.text, path, text.count("\n", 0, name.start) + 1, aliased)
        index += 1


def is_namespace(head):
    words = [token.text for token in head]
    return "namespace" in words or words == ["extern", '"C"']


def is_inside(head):
    """Returns whether a brace after `head` opens an initializer inside of an alias or of parentheses."""
    words = [token.text for token in head]
    return "using" in words or words.count("(") > words.count(")")


def alias(head):
    """Returns the name and the aliased tokens of `using NAME = ...`, or None."""
    head = without_template(head)
    if len(head) > 3 and head[0].text == "using" and head[2].text == "=":
        return head[1], tuple(token.text for token in head[3:])
    return None


def type_name(head):
    """Returns the name of the type that the declaration before a brace defines, and (); None if it defines no type."""
    head = without_template(head)
    keys = [index for index, token in enumerate(head) if token.text in TYPE_KEYS]
    if not keys or any(token.text == "=" for token in head):
        return None
    index = keys[0] + 1
    if head[index : index + 1] and head[index].text in ("class", "struct"):  # enum class
        index += 1
    while index < len(head) and head[index].text in ("[", "alignas", "__attribute__"):
        index = cpp_text.closing(head, index if head[index].text == "[" else index + 1) + 1
    after = head[index + 1].text if index + 1 < len(head) else "{"
    is_qualified = after == ":" and head[index + 2 : index + 3] and head[index + 2].text == ":"
    if index >= len(head) or is_qualified or after not in ("{", "final", ":"):
        return None  # without a name, nested, specialized, or a function
    return head[index], ()


def without_template(head):
    """Returns the declaration without `template <...>`."""
    while head and head[0].text == "template":
        depth = 0
        for index in range(1, len(head)):
            depth += (head[index].text == "<") - (head[index].text == ">")
            if depth == 0:
                break
        head = head[index + 1 :]
    return head


SAMPLE = {
    "lockstep/base/a.h": """\
#pragma once
namespace lockstep::base {
struct Later;
class Piece final : public Base {
  struct Impl {};
};
enum class Kind { kA, kB };
template <class T, int N = 3>
struct alignas(64) Box {};
using Clock = std::chrono::steady_clock;
using Names = std::vector<std::string>;
template <class D>
using Batch = decltype(make(std::declval<D>(), {}));
void call(Options options = {}) {}
struct stat* find(struct stat* status) {
  struct Inner {};
}
const std::map<int, int> kTable = {{1, 2}};
struct Later {
  struct Impl {};
};
}  // namespace lockstep::base
""",
    "lockstep/base/b.cc": """\
namespace lockstep {
namespace {
struct Piece { @flag
  enum Kind { kC };
};
enum class Kind : int { kD }; @flag
using Box = int; @flag
using Clock = std::chrono::steady_clock;
using Names = std::set<std::string>; @flag
class Inner {};
union Value {
  int x;
};
}
extern "C" {
struct [[nodiscard]] Value {}; @flag
}
using Batch = int; @flag
struct Later;
class Inner;
template <>
struct Box<int> {};
struct Outer::Impl {};
using base::Piece;
struct Outer { @flag
  int x{3};
} outer;
struct option { int x; };
const struct option kOptions[] = {{1}};
}
""",
    "lockstep/base/a.cc": "struct Outer {\n  struct Impl;\n};\n",
    "lockstep/comm/nccl.cc": "struct Communicator {};\n",
    "lockstep/comm/no_nccl.cc": "struct Communicator {};\n",
    "tests/a.cc": "struct Piece {};\n",
}
