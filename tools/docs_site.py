"""Builds the documentation as a site, in build/site; run by `make docs`. Also a hook of MkDocs (mkdocs.yml).

The pages of docs/ link to files of the repository outside of docs/, as GitHub shows them. The hook adds each
of those files to the site as a page, and the files that these link to, and leads the links there."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = "repository/"
"""Folder of the site with the files outside of docs/."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
"""The path of a relative link in Markdown, without its anchor."""
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """Yields the paths of the relative links of a page."""
    for match in LINK.finditer(CODE.sub("", text)):
        yield match[1]


def file_of(uri: str) -> str:
    """Returns the path in the repository of a page of the site."""
    if not uri.startswith(PLACE):
        return f"docs/{uri}"
    path = uri.removeprefix(PLACE)
    return path if (ROOT / path).is_file() else path.removesuffix(".md").removesuffix("/index")


def uri_of(path: str) -> str:
    """Returns the page of the site that shows a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{PLACE}{path}/index.md"
    return PLACE + path + ".md" * (not path.endswith(".md"))


def target_of(path: str, link: str) -> str:
    """Returns the path in the repository to which a link leads: in the file `path`, or on a folder's page."""
    folder = path if (ROOT / path).is_dir() else PurePosixPath(path).parent
    return os.path.normpath(f"{folder}/{link}")


def page_of(path: str) -> str:
    """Returns a file or folder outside of docs/ as Markdown."""
    place = ROOT / path
    if path.endswith(".md"):
        return place.read_text(encoding="utf-8")
    if place.suffix == ".ipynb":
        cells = json.loads(place.read_text(encoding="utf-8"))["cells"]
        texts = ((cell["cell_type"], "".join(cell["source"])) for cell in cells)
        return "\n\n".join(t if kind == "markdown" else f"```python\n{t}\n```" for kind, t in texts)
    if place.is_dir():
        names = sorted(p.name for p in place.iterdir() if p.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names)])
    language = {".py": "python", ".sh": "bash", ".yaml": "yaml"}.get(place.suffix, "text")
    text = f"# {path}\n\n````{language}\n{place.read_text(encoding='utf-8')}````\n"
    return f"---\nsearch:\n  exclude: true\n---\n\n{text}"


def outside_pages(pages: dict[str, str]) -> dict[str, str]:
    """Returns the text of each file outside of docs/ that `pages` (path -> text) link to, directly or through
    other such files."""
    found: dict[str, str] = {}
    waiting = list(pages.items())
    while waiting:
        path, text = waiting.pop()
        for target in {target_of(path, link) for link in links(text)} - found.keys():
            if not target.startswith(("docs/", "..")) and (ROOT / target).exists():
                found[target] = page_of(target)
                waiting.append((target, found[target]))
    return found


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of files outside of docs/ (an event of MkDocs)."""
    from mkdocs.structure.files import File

    pages = {file_of(file.src_uri): file.content_string for file in files.documentation_pages()}
    for path, text in outside_pages(pages).items():
        files.append(File.generated(config, uri_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Leads the links of a page to pages of the site (an event of MkDocs)."""
    uri = page.file.src_uri
    path = file_of(uri)

    def led(match: re.Match[str]) -> str:
        target = target_of(path, match[1])
        return (
            os.path.relpath(uri_of(target), PurePosixPath(uri).parent)
            if (ROOT / target).exists()
            else match[0]
        )

    pieces = re.split(rf"({CODE.pattern})", markdown, flags=CODE.flags)
    return "".join(piece if piece.startswith("```") else LINK.sub(led, piece) for piece in pieces)


def main() -> None:
    """Builds the site and tells how long it took. `serve` shows it at 127.0.0.1:8000 instead, and follows
    edits; `requirements` prints the packages that this needs."""
    words = sys.argv[1:] or ["build", "--strict"]
    if words == ["requirements"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        print(*project["optional-dependencies"]["docs"], sep="\n")
        return
    start = time.monotonic()
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", *words], cwd=ROOT, env=environment, check=False)
    print(f"{time.monotonic() - start:.1f} s")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
