"""The site: Sphinx reads Markdown through MyST, and docstrings of public names; `make docs` builds it offline."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from docstrings import MOCKED

from pybk.version import __version__

project = "pybk"
author = "pybk contributors"
project_copyright = "pybk contributors, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "drawing",
    "figures",
    "docstrings",
    "errors",
    "settings",
    "commands",
    "routes",
]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore = [
    ("py:class", "ASGIApp"),  # of Starlette, whose documents have no inventory
    ("py:class", "Selection"),  # of a consumer's record, like the next: retention takes them apart, and no user
    ("py:class", "FinishedLedgers"),
    ("py:class", "DescribedLedger"),
    ("py:class", "Shown"),  # the keywords of the interface, which each of its users lists
]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = list(MOCKED)
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [(name, "params_style") for name in ("Behaviour", "Performance", "Access", "Tracing")]

copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "pybk"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
