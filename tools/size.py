"""Counts the lines of the package: `make size`.

Code lines have no blanks, comments and docstrings. The code that a command can run is that of all modules
which its module reaches by imports, at the top of a file or inside functions, and by texts such as
"package.module" and "package.module:NAME". The public names of `openrlhf.api`, which are imported when they
are used, count for none; nor do the hooks and programs that entry points attach to a run.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Set
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRIES = {"openrlhf ppo": "openrlhf.cli.train_ppo_ray", "openrlhf sft": "openrlhf.cli.train_sft"}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
}
REFERENCE = re.compile(r"\"(openrlhf(?:\.\w+)+)(?::\w+)?\"")


def modules(root: Path) -> dict[str, str]:
    """Returns the name of each module of the package -> its text."""
    found = {}
    for path in sorted((root / "openrlhf").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@cache
def statements(text: str) -> list[ast.AST]:
    """Returns a module's statements, and the parts of statements that have some of their own. What is inside
    expressions is left out, which is most of a module."""
    found: list[ast.AST] = [ast.parse(text)]
    for node in found:
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, name, None)
            found += inside if isinstance(inside, list) else []
    return found


def code_lines(text: str) -> int:
    """Returns the number of lines of a module that are code."""
    described: set[int] = set()
    for item in statements(text):
        match item:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                described.update(range(first, last + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - described)


@cache
def named(text: str) -> set[str]:
    """Returns the names of modules in a module's imports and texts, and of what it imports of them."""
    found: set[str] = set(REFERENCE.findall(text))
    for node in statements(text):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def imports(name: str, text: str, known: Set[str]) -> set[str]:
    """Returns the modules of the package that a module imports, and the packages around them."""
    found = set()
    for module in named(text):
        parts = module.split(".")
        found |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return found & known - ({"openrlhf.api"} if name == "openrlhf" else set())


def reached(entry: str, texts: dict[str, str]) -> set[str]:
    """Returns the modules that a module can import, itself included."""
    found: set[str] = set()
    left = [entry]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += imports(name, texts[name], texts.keys())
    return found


def figures(root: Path = ROOT) -> dict[str, int]:
    """Returns the number of lines of the package, and the code lines that each command reaches."""
    texts = modules(root)
    reach = {title: reached(entry, texts) for title, entry in ENTRIES.items()}
    code = {name: code_lines(texts[name]) for name in set().union(*reach.values())}
    commands = {title: sum(code[name] for name in names) for title, names in reach.items()}
    return {"lines": sum(len(text.splitlines()) for text in texts.values()), **commands}


def main() -> None:
    texts, folders = modules(ROOT), Counter()
    for name, text in texts.items():
        folders[name.partition(".")[2].partition(".")[0]] += len(text.splitlines())
    for folder, count in folders.most_common():
        print(f"{count:>7,} {folder or 'openrlhf'}", file=sys.stderr)
    for title, count in figures().items():
        print(f"{title}: {count:,}" + " code lines" * (title != "lines"))


if __name__ == "__main__":
    main()
