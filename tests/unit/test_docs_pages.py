"""The manual: links lead somewhere, quoted messages are those of the code, pages are bounded, and the site builds."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from swarmnet.cli.frame import swarmnet

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BESIDE = sorted([*(ROOT / ".agents").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
"""No pages of the manual, but their links and commands are held, too."""


def headings(page: str) -> set[str]:
    """What a link may name behind #, as forges derive it from headings."""
    found = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(file.read_text(encoding="utf-8")), f"{page.name} links to {target}"


def commands(page: str) -> list[list[str]]:
    """What a page tells people to type: the words of each `swarmnet ...`, in a block or in a sentence."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line.partition("# ")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    return [line.split()[1:] for line in lines if re.match(r"swarmnet [a-z]+ ", line)]


@pytest.mark.parametrize(
    "page", [page for page in [*PAGES, *BESIDE] if page.name != "CHANGELOG.md"], ids=lambda path: path.name
)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    for name, *words in commands(page.read_text(encoding="utf-8")):
        command = swarmnet.get_command(click.Context(swarmnet), name)
        if isinstance(command, click.Group) and words:
            command = command.commands.get(words[0])
        assert command is not None, f"{page.name}: swarmnet {name}"
        context = click.Context(command, **command.context_settings)  # a command remembers its help option
        known = {each for param in command.get_params(context) for each in (*param.opts, *param.secondary_opts)}
        named = [word.partition("=")[0] for word in words if re.match("--[a-z]", word)]
        assert known.issuperset(named), f"{page.name}: swarmnet {name} {' '.join(words)}"


def templates(source: str) -> list[str]:
    """Every text in a module, with … where an f-string has a value."""
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def said(message: str, texts: list[str]) -> bool:
    """Does one text have the pieces of `message` between its … in their order?"""
    pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_troubleshooting_quotes_what_the_code_says() -> None:
    texts = [text for path in (ROOT / "swarmnet").rglob("*.py") for text in templates(path.read_text(encoding="utf-8"))]
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        quote for line in re.findall(r"^### (.*)$", page, flags=re.MULTILINE) for quote in re.findall("`(.+?)`", line)
    ]
    assert len(quoted) > 20
    assert not [message for message in quoted if not said(message, texts)]


def test_a_message_that_nobody_prints_is_found() -> None:
    texts = templates('def f(x):\n    raise E(f"stage {x} is gone: " "start it")')
    assert said("stage … is gone: start", texts) and said("start it", texts)
    assert not said("stage … has gone", texts)


MOST_PAGES = 38
MOST_WORDS = 48_000
MOST_WORDS_OF_A_PAGE = 2_000
LONGER = {"architecture.md": 2_050, "numerics.md": 2_400, "protocol.md": 3_700}
"""Pages that may have more words, code blocks included. A line here only ever shrinks."""

MANUAL = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = {*generate.pages(), "events.md"}


def count_words(page: Path) -> int:
    """All of it: tables, code, and what stands behind any heading."""
    return len(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", [page for page in MANUAL if page.name not in GENERATED], ids=lambda path: path.name)
def test_a_page_is_short_to_its_last_line(page: Path) -> None:
    assert count_words(page) <= LONGER.get(page.name, MOST_WORDS_OF_A_PAGE)


def test_the_manual_is_bounded() -> None:
    assert len(MANUAL) <= MOST_PAGES
    assert sum(map(count_words, MANUAL)) <= MOST_WORDS
    assert LONGER.keys() <= {page.name for page in MANUAL}


@pytest.mark.parametrize("name", generate.pages())
def test_the_reference_is_that_of_the_code(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == generate.pages()[name], "run: python docs/generate.py"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs", "."]
    built = subprocess.run([*command, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    manual = (tmp_path / "site/docs/index.html").read_text(encoding="utf-8")
    assert all(f">{section}<" in manual for section in ("Guide", "Concepts", "Reference", "Contributing"))
    assert 'href="protocol.html"' in manual


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_is_reached_from_the_manual() -> None:
    readme, manual = ROOT / "README.md", ROOT / "docs/index.md"
    assert manual in linked(readme)
    assert set(PAGES) - linked(manual) == {readme, manual}


def test_the_readme_has_at_most_1000_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
