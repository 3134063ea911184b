"""Fragments of the changelog: each is well named, and a release assembles them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("tools_changelog", ROOT / "tools/changelog.py")
changelog = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(changelog)

BEFORE = "# Changes\n\nWhat a user notices.\n\n## 0.1.0, not released yet\n\n- Old.\n"


def test_the_fragments_of_this_tree_are_well_named() -> None:
    changelog.fragments(ROOT / ".changes")


@pytest.mark.parametrize(
    ("name", "text"), [("x.md", "A."), ("x.news.md", "A."), ("X.fixed.md", "A."), ("x.fixed.md", " ")]
)
def test_a_fragment_of_another_name_or_without_text_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="NAME"):
        changelog.fragments(tmp_path)


def test_fragments_are_sorted_by_type_and_name(tmp_path: Path) -> None:
    for name in ("a.fixed.md", "c.added.md", "b.added.md", "README.md"):
        (tmp_path / name).write_text("A.")
    assert [path.name for path in changelog.fragments(tmp_path)] == ["b.added.md", "c.added.md", "a.fixed.md"]


def test_a_release_dates_its_section_and_the_next_gets_its_own() -> None:
    first = changelog.assembled(BEFORE, "0.1.0", "2026-12-24", ["New\nthing."])
    assert "\n\n## 0.1.0, 2026-12-24\n\n- New thing.\n- Old.\n" in first
    second = changelog.assembled(first, "0.2.0", "2027-01-02", ["word " * 40])
    assert second.index("What a user notices.\n\n## 0.2.0, 2027-01-02\n\n- word") < second.index("## 0.1.0, 2026-12-24")
    assert "word\n  word" in second and "word\n\n## 0.1.0" in second and second.endswith("- Old.\n")
    with pytest.raises(ValueError, match=r"0\.1\.0 was released before"):
        changelog.assembled(second, "0.1.0", "2027-01-03", ["Late."])
