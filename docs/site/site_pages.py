"""Makes a site of the repository's Markdown files: the order of the pages, API pages, two languages, and the search."""

import pathlib
import re
import shutil

import site_api
from docutils import nodes
from sphinx import addnodes
from sphinx.search.en import SearchEnglish

HERE = pathlib.Path(__file__).parent
PROJECT = "docs/status docs/benchmarks docs/benchmarks-gpu CHANGELOG CONTRIBUTING tests/README SECURITY".split()
# A paragraph that begins so has further words for which the search finds the page: in backticks, or between "、".
ALSO_CALLED = ("Also called:", "又名：")
CHINESE = re.compile("([\u3400-\u9fff]+)")
IS_CHINESE = re.compile(r"README\.zh-CN$|docs/zh/")  # a page
# Code, and line breaks between Chinese characters, which browsers would show as spaces.
CODE_OR_BREAK = re.compile("(?s)(```.*?```)|(?<=[\u3000-\u9fff\uff00-\uffef])\n(?=[\u3000-\u9fff\uff00-\uffef])")


class BilingualSearch(SearchEnglish):
    """One index for English and Chinese, which has no spaces: there each character and each pair of them is a word.

    site_search.js splits queries alike. A dictionary, such as that of jieba, would exist in the build only.
    """

    js_splitter_code = (HERE / "site_search.js").read_text()

    def split(self, text):
        words = []
        for part in CHINESE.split(text):
            pairs = [part[i : i + 2] for i in range(len(part) - 1)]
            words += [*part, *pairs] if CHINESE.match(part) else super().split(part)
        return words


def stage(app, config):
    """Makes the folder that Sphinx reads: a copy of the repository, and the API pages."""
    source, root = pathlib.Path(app.srcdir), pathlib.Path(config.repository)
    shutil.rmtree(source)
    shutil.copytree(root, source, ignore=shutil.ignore_patterns("build", "runs", ".*", "__pycache__"))
    for name, text in {**site_api.cpp_pages(root), **site_api.python_pages(root)}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)


def tables_of(source, index):
    """Yields the heading and the pages of each table in a page that lists pages, such as docs/README.md."""
    path, seen = source / index, set()
    for table in re.findall(r"(?:^\|.*\n)+", path.read_text() if path.exists() else "", re.M):
        heading = re.split("[|,，、]", table)[1].strip()
        links = [link for link in re.findall(r"\]\(([^)#]+)\.md", table) if link not in seen]
        seen.update(links)
        yield heading[0].upper() + heading[1:], [(path.parent / link).relative_to(source).as_posix() for link in links]


def add_navigation(app, docname, content):
    """Adds the tables of docs/README.md and docs/zh/README.md, and the API pages, to the front page as navigation."""
    content[0] = CODE_OR_BREAK.sub(lambda match: match[1] or "", content[0])
    source, found = pathlib.Path(app.srcdir), sorted(app.env.found_docs)
    chinese = list(tables_of(source, "docs/zh/README.md"))
    listed = {name for _, names in chinese for name in names}
    trees = [("", ["docs/README"]), *tables_of(source, "docs/README.md")]
    python = [f"api/python/{module}" for module in site_api.MODULES]
    trees.append(("API", [*python, *(name for name in found if name.startswith("api/cpp/"))]))
    trees.append(("Project", PROJECT))
    trees.append(("中文", [name for name in found if IS_CHINESE.match(name) and name not in listed]))
    for heading, names in trees + chinese if docname == "README" else []:
        lines = [f":caption: {heading}"] * bool(heading) + [":hidden:", "", *(f"/{name}" for name in names)]
        content[0] += "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n" if names else ""


def add_search_words(app, doctree):
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if paragraph.astext().startswith(ALSO_CALLED):
            words = [word.astext() for word in paragraph.findall(nodes.literal)]
            words += re.split("[、,] ?", re.split("[:：] ?", paragraph.astext().rstrip("。."), maxsplit=1)[1])
            entries = [("single", word.strip(), "", "main", None) for word in words if word.strip()]
            paragraph.parent.insert(paragraph.parent.index(paragraph), addnodes.index(entries=entries))


def set_language(app, pagename, template, context, doctree):
    """Shows only pages of one language in the navigation, and adds a link to this page in the other language."""
    chinese = bool(IS_CHINESE.match(pagename))
    trees = re.split('(?=<p class="caption")', context["furo_navigation_tree"])
    shown = [tree for tree in trees if bool(CHINESE.search(tree.partition("</p>")[0])) == chinese]
    context |= {"furo_navigation_tree": "".join(shown), "language": "zh-CN" if chinese else "en"}
    other = {"README": "README.zh-CN", "README.zh-CN": "README"}.get(pagename)
    other = other or re.sub("^docs/(zh/)?", "docs/" if chinese else "docs/zh/", pagename)
    if other != pagename and other in app.env.found_docs:
        link = f'<a class="language" href="{context["pathto"](other)}">{"English" if chinese else "中文"}</a>'
        context["body"] = link + context["body"]


def finish(app, exception):
    """Makes the front page index.html, and puts the Markdown files beside the pages, for llms.txt."""
    if exception is None:
        for path in map(app.env.doc2path, app.env.found_docs):
            shutil.copy(path, app.outdir / path.relative_to(app.srcdir))
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app):
    app.add_config_value("repository", str(HERE.parent.parent), "env")
    app.add_search_language(BilingualSearch)
    app.connect("config-inited", stage)
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", add_search_words)
    app.connect("html-page-context", set_language, priority=900)  # after furo's
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
