"""Finds docstrings that begin with a word like "Of" or "What" and so name no subject; run by `make lint`.

python tools/check_prose.py openrlhf tests
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = {"Of", "What", "Those", "That", "Who", "Whose", "Which", "Theirs", "Behind", "Beside"}
REMEDY = 'begin with a verb ("Returns the ...") or with a noun that names the subject ("Number of ...")'


def main() -> None:
    files = (file for folder in sys.argv[1:] for file in sorted(Path(folder).rglob("*.py")))
    problems = [
        f"{file}:{line}: the docstring begins with {word!r}: {REMEDY}"
        for file in files
        for line, word in fragments(file.read_text())
    ]
    if problems:
        sys.exit("\n".join(problems))


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and first word of each fragment among the docstrings of a module and of its classes,
    functions and attributes. Docstrings of attributes are the help texts of flags."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                word = " ".join(text.split()[:1]).strip(".,:;`")
                if word in WORDS:
                    yield node.lineno, word


if __name__ == "__main__":
    main()
