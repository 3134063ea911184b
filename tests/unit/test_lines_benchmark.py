"""What counts as code, docstring and comment."""

from benchmark_modules import load

lines = load("lines")

SOURCE = '''"""A module.

Of two lines.
"""

# alone
WORDS = "a string that is used"  # beside code
"""What it is for."""


def work() -> str:
    """Does it."""
    return """# no comment
    but code"""
'''


def test_each_line_is_counted_as_what_it_is() -> None:
    assert lines.count(SOURCE) == {"all": 14, "code": 4, "docstring": 6, "comment": 2}


def test_rooms_hold_all_modules_but_generated_ones() -> None:
    found = lines.rooms()
    modules = [path for path in lines.PACKAGE.rglob("*.py") if lines.GENERATED not in path.parents]
    assert sum(counts["files"] for counts in found.values()) == len(modules)
    assert {"step", "net", "."} <= found.keys() and all(counts["code"] <= counts["all"] for counts in found.values())
