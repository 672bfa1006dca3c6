"""Makes the API pages: of C++ from the headers that users include, of Python from the docstrings, without importing it.

Headers are meant to be read: their pages show declarations. (doxygen 1.9.4 takes `namespace a::inline b` for `b`.)
"""

import ast
import re

from sphinx.ext.napoleon import Config, GoogleDocstring

# Headers that lockstep.h includes but users do not name; and headers that users include one by one.
INTERNAL = re.compile(r"base/(?!error|cause|deadline)|chunk_sink|pending|_reducer|/files/|_header|visit_tensors")
STANDALONE = ("data/datasets/*.h", "train/loggers/*.h", "train/metrics/*.h", "train/report/*.h", "cuda/graphed_step.h")
NAMESPACE = re.compile(r"^namespace lockstep[\w: ]* \{\n(.*?)^\}  // namespace lockstep", re.S | re.M)
LEFT_OUT = re.compile(r"^namespace detail \{.*?^\}  // namespace detail\n|\n^( *) private:\n.*?(?=^\1\};)", re.S | re.M)
FORWARD = re.compile(r"(?:(?:class|struct) \w+;\s*|extern template [^;]*;\s*|using [\w:]+;\s*)*")
NAME = re.compile(r"\b(?:class|struct|enum class|concept|using) (\w+)|(?!requires|decltype)\b(\w+)(?: =|[(;{])")
DEFINITION = (ast.ClassDef, ast.FunctionDef)
# Module -> files that define what it exports.
MODULES = {"lockstep": "__init__ group ddp host_shared host_sync errors"}
MODULES |= {f"lockstep.{name}": name for name in ("optim", "data", "nn", "checkpoint", "lightning")}
MODULES |= {"lockstep.horovod": "horovod/__init__ horovod/operations", "lockstep.horovod.elastic": "horovod/elastic"}


def public_headers(root):
    found = {path.relative_to(root).as_posix() for name in STANDALONE for path in (root / "lockstep").glob(name)}
    new = ["lockstep/lockstep.h"]
    while new:
        names = set(re.findall(r'^#include "(lockstep/[^"]+)"', (root / new.pop()).read_text(), re.M)) - found
        new += names
        found |= names
    return sorted(name for name in found if not INTERNAL.search(name))


def prose(comment):
    """Returns a comment as Markdown: indented lines are code, and of Markdown's characters only ` has a meaning."""
    text = re.sub(r"^///? ?", "", comment, flags=re.M)
    text = re.sub(r"^(  .*\n(?: *\n(?=  )|  .*\n)*)", r"\n```text\n\1```\n", text, flags=re.M)
    parts = re.split(r"(^```.*?^```|`[^`]*`)", text, flags=re.S | re.M)
    return "".join(part if index % 2 else re.sub(r"([<*_\[#])", r"\\\1", part) for index, part in enumerate(parts))


def declarations(text):
    """Yields the name, the comment and the code of each declaration in the namespaces of a header."""
    for body in NAMESPACE.findall(text):
        body = re.sub(r"^(?!//)(.+\n)(?=//)", r"\1\n", LEFT_OUT.sub("", body), flags=re.M)
        body = re.sub(r"^(//.*\n)\n+(?=//)", r"\1//\n", body, flags=re.M)
        for part in re.split(r"\n\n+(?=[^\s}])", body.strip("\n") + "\n"):
            comment = re.match("(?://.*\n)*", part)[0]
            code = part[len(comment) :].strip()
            name = NAME.search(re.sub(r"\[\[.*?\]\]|^template <.*>$", "", code, flags=re.M))
            if not FORWARD.fullmatch(code) and name and name[name.lastindex] not in ("visit_options", "copy_options"):
                yield name[name.lastindex], comment, code


def cpp_pages(root):
    pages = {}
    for header in public_headers(root):
        module, text = header.split("/", 1)[1].rpartition("/")[0], (root / header).read_text()
        page = pages.setdefault(f"api/cpp/{module.replace('/', '-')}.md", [f"# C++: {module}"])
        page += [f"## {header}", prose(re.match("(?://.*\n)*", text)[0])]
        for name, comment, code in declarations(text):
            page += [f"### {name}", prose(comment), f"```{{code-block}} cpp\n:class: api\n\n{code}\n```"]
    return {path: "\n\n".join(page) for path, page in pages.items()}


def entry(node, in_class=False):
    """Returns the lines of reStructuredText for a class with its methods, or for a function."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    is_class = isinstance(node, ast.ClassDef)
    kind = "class" if is_class else "property" if "property" in decorators else "method" if in_class else "function"
    members = [part for part in node.body if isinstance(part, DEFINITION)] if is_class else []
    signed = next((part for part in members if part.name == "__init__"), node)
    signature = ""
    if isinstance(signed, ast.FunctionDef) and kind != "property":
        own = (is_class or in_class) and "staticmethod" not in decorators
        arguments = re.sub("^(self|cls)(, |$)" if own else "^$", "", ast.unparse(signed.args))
        signature = f"({arguments})" + (f" -> {ast.unparse(node.returns)}" if not is_class and node.returns else "")
    body = ["", *GoogleDocstring(ast.get_docstring(node) or "", Config(napoleon_use_ivar=True)).lines(), ""]
    for part in members:
        if not part.name.startswith("_") and ast.get_docstring(part):
            body += entry(part, in_class=True)
    return [f".. py:{kind}:: {node.name}{signature}", *(f"   {line}".rstrip() for line in body)]


def python_pages(root):
    pages = {}
    for module, files in MODULES.items():
        texts = [(root / f"python/lockstep/{file}.py").read_text() for file in files.split()]
        exported = re.findall(r'"(\w+)"', "".join(re.findall("^__all__.*", "".join(texts), re.M)))
        doc = ast.get_docstring(ast.parse(texts[0]))
        lines = [module, "=" * len(module), "", f".. py:module:: {module}", "", doc, ""]
        for node in (node for text in texts for node in ast.parse(text).body if isinstance(node, DEFINITION)):
            if node.name in exported if exported else not node.name.startswith("_"):
                lines += entry(node)
        pages[f"api/python/{module}.rst"] = "\n".join(lines)
    return pages
