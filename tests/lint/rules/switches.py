"""A switch in lockstep/ over an enum of the project has no `default:`: the compiler reports a missing enumerator.

A `default:` that calls throw_unexpected() is the answer to all kinds of messages that the reader does not expect.
"""

import os
import re
import sys

from source_tree import Finding

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../scripts"))

import cpp_text  # noqa: E402

ENUMERATOR = re.compile(r"k[A-Z0-9]\w*")


def check(tree):
    code = {path: cpp_text.tokens(tree.text(path)) for path in tree.cpp("lockstep")}
    names = {name for path in code for name in enum_names(code[path])}
    for path in code:
        for default, labels in switches(code[path]):
            if default is not None and any(is_enumerator(label, names) for label in labels):
                line = tree.text(path).count("\n", 0, default.start) + 1
                yield Finding(path, line, "default: in a switch over an enum of the project; list its enumerators")


def enum_names(code):
    """Yields the names of the enums that a file defines, and the enumerators of the unscoped ones."""
    for index, token in enumerate(code):
        if token.text != "enum":
            continue
        is_scoped = code[index + 1 : index + 2] and code[index + 1].text in ("class", "struct")
        at = index + (2 if is_scoped else 1)
        while at < len(code) and code[at].text not in ("{", ";", "(", ")"):
            if at == index + (2 if is_scoped else 1):
                yield code[at].text
            at += 1
        if at < len(code) and code[at].text == "{" and not is_scoped:
            end = cpp_text.closing(code, at) or len(code)
            yield from (one.text for one in code[at:end] if ENUMERATOR.fullmatch(one.text))


def switches(code):
    """Yields (the token `default` or None, the case labels as lists of words) of each switch."""
    for index, token in enumerate(code):
        if token.text != "switch" or index + 1 >= len(code) or code[index + 1].text != "(":
            continue
        opening = (cpp_text.closing(code, index + 1) or len(code)) + 1
        if opening >= len(code) or code[opening].text != "{":
            continue
        yield body(code, opening)


def body(code, opening):
    default, labels = None, []
    depth = 0
    at = opening
    while at < len(code):
        word = code[at].text
        depth += (word == "{") - (word == "}")
        if depth == 0:
            break
        if word == "switch" and at > opening:  # a nested switch has labels of its own
            inner = (cpp_text.closing(code, at + 1) or len(code)) + 1
            at = cpp_text.closing(code, inner) if inner < len(code) and code[inner].text == "{" else None
            if at is None:
                break
        elif word == "default" and code[at + 1 : at + 2] and code[at + 1].text == ":":
            if not any(token.text == "throw_unexpected" for token in code[at + 2 : at + 6]):
                default = code[at]
        elif word == "case":
            label = []
            while at + 1 < len(code) and not is_end_of_label(code, at + 1):
                at += 1 if code[at + 1].text != ":" else 2
                label.append(code[at].text)
            labels.append([part for part in label if part != ":"])
        at += 1
    return default, labels


def is_end_of_label(code, at):
    """Returns whether the token at `at` is a colon that is not half of `::`."""
    return code[at].text == ":" and not (
        at + 1 < len(code) and code[at + 1].start == code[at].end and code[at + 1].text == ":"
    )


def is_enumerator(label, names):
    """Returns whether a label such as ["base", "Cause", "kDesync"] names an enumerator of one of the enums."""
    if not label or not ENUMERATOR.fullmatch(label[-1]):
        return False
    return label[-2] in names if len(label) > 1 else label[-1] in names


SAMPLE = {
    "lockstep/base/a.h": """\
enum class Cause : int { kDied, kStuck };
enum Old { kOne, kTwo = 2 };
struct Frame {
  enum class [[nodiscard]] Unnamed;
  enum class Kind { kJob };
};
""",
    "lockstep/base/a.cc": """\
int f(Cause cause) {
  switch (cause) {
    case Cause::kDied: return 1;
    case base::Cause::kStuck: break;
  }
  switch (cause) {
    case base::Cause::kDied: return 1;
    default: return 2; @flag
  }
  switch (old) {
    case kOne:
    case kTwo: return 1;
    default: break; @flag
  }
  switch (dtype) {
    case at::kFloat: return 1;
    case c10::DeviceType::kCPU: return 2;
    default: throw 1;
  }
  switch (text[0]) {
    case 'a': return 1;
    case ':': return 2;
    default:
      switch (frame.kind) {
        case Frame::Kind::kJob: {
          return 1;
        }
        default: return 3; @flag
      }
  }
  switch (cause) {
    case Cause::kDied:
      switch (x) {
        case 1: break;
        default: break;
      }
      break;
    case Cause::kStuck: break;
  }
  switch (frame.kind) {
    case Frame::Kind::kJob: return 1;
    default: protocol::throw_unexpected(frame.kind);
  }
  // switch (cause) { case Cause::kDied: default: }
}
""",
    "tests/a.cc": """\
int f(Cause cause) {
  switch (cause) {
    case Cause::kDied: return 1;
    default: return 2;
  }
}
""",
}
