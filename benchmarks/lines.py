"""Lines of swarmnet/ by room: code, docstrings, comments. Generated code is left out.

    python benchmarks/lines.py [--json FILE]

A line of code has something to run on it; a docstring is any string that stands alone; a comment is counted where it
stands, beside code or on a line of its own. The goals: at most 26,000 lines of code and 39,000 in all, comments on 4 %
of the lines at least. The spine is what docs/architecture.md leads through.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "swarmnet"
GENERATED = PACKAGE / "wire" / "pb"
MOST_CODE, MOST_LINES, LEAST_COMMENTS = 26_000, 39_000, 0.04


def count(source: str) -> Counter[str]:
    """Lines of one module: `all`, `code`, `docstring`, `comment`."""
    lines = source.splitlines()
    alone = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    docstring = {line for node in alone for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comment = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    code = {
        number
        for number, line in enumerate(lines, 1)
        if line.strip() and number not in docstring and not line.lstrip().startswith("#")
    }
    return Counter(all=len(lines), code=len(code), docstring=len(docstring), comment=len(comment - docstring))


def rooms(package: Path = PACKAGE) -> dict[str, Counter[str]]:
    """Each room's counts, and how many `files` it has; modules of the package itself are the room `.`."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(package.rglob("*.py")):
        if GENERATED in path.parents:
            continue
        room = path.relative_to(package).parts[0] if path.parent != package else "."
        found.setdefault(room, Counter()).update(count(path.read_text(encoding="utf-8")) | Counter(files=1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    found = rooms()
    columns = ("files", "all", "code", "docstring", "comment")
    print(f"{'room':12}" + "".join(f"{column:>11}" for column in columns))
    for room, counts in sorted(found.items(), key=lambda item: -item[1]["all"]):
        print(f"{room:12}" + "".join(f"{counts[column]:11,}" for column in columns))
    total = sum(found.values(), Counter[str]())
    print(f"{'in all':12}" + "".join(f"{total[column]:11,}" for column in columns))
    print(
        f"code {total['code'] / MOST_CODE:.2f} of the goal, lines {total['all'] / MOST_LINES:.2f}, "
        f"comments on {total['comment'] / total['all']:.1%} of the lines (goal {LEAST_COMMENTS:.0%})"
    )
    if options.json:
        share = {"comment_share": total["comment"] / total["all"]}
        options.json.write_text(json.dumps({"rooms": found, "total": total | share}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
