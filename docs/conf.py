"""The site of the manual: `python -m sphinx -W -b html -c docs . docs/_build`, with the extra `docs`.

The source is the repository's root, because pages link to CONTRIBUTING.md and its neighbours.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "swarmnet"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md"]
myst_heading_anchors = 4

ROOT = Path(__file__).parents[1]


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the manual a navigation: a toctree for each section, of the pages that it links to.

    On forges docs/index.md stays a plain page, and its links are the only list of pages. A link to a file that is no
    page is shown as the file's name.
    """
    page = ROOT / f"{name}.md"

    def plain(link: re.Match[str]) -> str:
        target = (page.parent / link[2].partition("#")[0]).resolve()
        return (
            link[0] if "://" in link[2] or target.suffix == ".md" or link[2][0] == "#" else f"{link[1]} (`{link[2]}`)"
        )

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", plain, source[0])
    if name == "README":
        source[0] = "---\norphan: true\n---\n" + source[0]
    if name == root_doc:
        first, *sections = re.split(r"^## ", source[0], flags=re.MULTILINE)
        source[0] = "## ".join([first, *map(with_navigation, sections)])


def with_navigation(section: str) -> str:
    """A section of the manual, with a toctree of the pages that it links to."""
    pages = dict.fromkeys(re.findall(r"\]\((\S+)\.md\)", section))
    return (
        f"{section}\n```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n\n" + "\n".join(pages) + "\n```\n\n"
    )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", prepare)
