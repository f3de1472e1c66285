"""The documentation as a site, by Sphinx, furo and MyST: `make site`.

The pages are the files of the repository, which also reads as it is. The navigation is index.md: a heading, and the
pages that its table links to. The search leaves out the pages of its last section, and the design notes. The reference
of the Python API and the help of the commands are made here.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

from generate import command_line
from python_api import reference

ROOT = Path(__file__).parents[1]
INDEXES = "docs/index", "docs/design/README"
"""Pages whose links are the navigation."""
EVIDENCE = {
    posixpath.normpath(f"docs/{link}")
    for link in re.findall(r"\]\(([\w./-]+)\.md\)", (ROOT / "docs/index.md").read_text().rpartition("\n## ")[2])
}
"""Pages of the last section, for contributors: no user searches for them."""
PYTHON_API, COMMAND_LINE = "docs/python", "docs/cli"

project = html_title = "exactlyonce"
extensions = ["myst_parser"]
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_copy_source = html_show_sourcelink = False
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/**", "*.md", "tests/README.md"]
exclude_patterns = [".*", "src", "dist", "site"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # output is shown as it is, JSON by the line


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("build-finished", begin_at_the_index)


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Add what only the site has: the navigation, the Python API, the help of commands. A folder is no link there."""
    text = re.sub(r"\[([^\]]+)\]\([\w./-]+/\)", r"\1", source[0])
    if page.startswith("docs/design/") or page in EVIDENCE:
        text = f"---\nnosearch: true\n---\n{text}"
    if page in INDEXES:
        text += "\n".join(navigation(text))
        text = re.sub(r"\[[\w./-]+\.md\](?=\()", "[]", text)  # the title in place of the file's name
    if page == PYTHON_API:
        text += reference()
    if page == COMMAND_LINE:
        text = command_line(text)
    source[0] = text


def navigation(index: str) -> list[str]:
    """A hidden toctree for each heading: the pages that are linked below it, in order, each once."""
    lines, seen = [], set[str]()
    for section in re.split(r"^## ", index, flags=re.MULTILINE):
        heading, _, rest = section.partition("\n")
        links = [link for link in re.findall(r"\]\(([\w./-]+)\.md\)", rest) if link not in seen]
        seen |= {*links}
        if links:
            caption = [f":caption: {heading}"] if not heading.startswith("# ") else []
            lines += ["", "```{toctree}", ":hidden:", *caption, "", *dict.fromkeys(links), "```"]
    return lines


def begin_at_the_index(app: Sphinx, error: Exception | None) -> None:
    page = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html">'
    (Path(app.outdir) / "index.html").write_text(f'{page}<a href="docs/index.html">exactlyonce</a>\n')
