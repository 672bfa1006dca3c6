"""Sphinx's configuration for the documentation site of `make site`, which loads nothing from the network."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

project = html_title = "Lockstep"
extensions = ["myst_parser", "site_pages"]
root_doc, html_theme = "README", "furo"
include_patterns = "README*.md CONTRIBUTING.md CHANGELOG.md SECURITY.md tests/README.md docs/** api/**".split()
myst_heading_anchors = 4
default_role, highlight_language = "code", "text"  # of docstrings; of blocks without a language
smartquotes = add_module_names = False  # smartquotes would change "--"
maximum_signature_line_length = 80
html_static_path = html_css_files = ["site.css"]
html_extra_path = ["../../llms.txt"]
html_copy_source = html_show_copyright = html_show_sphinx = html_use_index = html_domain_indices = False
