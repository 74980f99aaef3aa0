"""The documentation as a site: every page has its place, every link leads somewhere, nothing is lost.

What needs MkDocs is skipped without `make docs`, which installs it."""

import html
import importlib
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from test_docs import CODE, anchors

import openrlhf.api

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv-docs" / "bin" / "python"
PYTHON = OWN if OWN.exists() else Path(sys.executable)
SITE = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (ROOT / "docs").rglob("*.md")}
RECORDS = ("openrlhf.types", "openrlhf.rows")
"""Modules whose public names are all on a page."""
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)(?:#([^)]+))?\)")
RENDER = """
import json, sys
from markdown_it import MarkdownIt
reader = MarkdownIt("gfm-like", {"linkify": False})
json.dump({path: reader.render(text) for path, text in json.load(sys.stdin).items()}, sys.stdout)
"""
"""Program that reads Markdown as GitHub does."""
TAGS = ("h1", "h2", "h3", "h4", "li", "ol", "pre", "strong", "td", "th", "tr", "ul")


def settings() -> dict:
    """Reads mkdocs.yml, with None in the place of what only MkDocs reads."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda *_: None)
    loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), loader)


def pages_of(nav: list | str | dict) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def test_every_page_has_its_place_once() -> None:
    pages = [SITE["file_of"](page) for page in pages_of(settings()["nav"])]
    assert {page: number for page, number in Counter(pages).items() if number > 1} == {}
    assert {page for page in pages if page.startswith("docs/")} == PAGES.keys()
    assert all((ROOT / page).exists() for page in pages)
    assert pages[0] == "docs/index.md"


def test_the_parts_are_those_of_diataxis() -> None:
    parts = [name for part in settings()["nav"] if isinstance(part, dict) for name in part]
    assert parts == ["Tutorials", "How-to", "Reference", "Explanation"]


def test_links_of_every_page_of_the_site_lead_somewhere() -> None:
    """Also those of files outside of docs/ that its pages link to, and of the pages beside the README."""
    beside = {page.name: page.read_text() for page in ROOT.glob("*.md")}
    pages = beside | PAGES | SITE["outside_pages"](PAGES)
    checked = 0
    for path, text in pages.items():
        if not path.endswith(".md") and not (ROOT / path).is_dir():
            continue  # the source of a program
        for link, anchor in LINK.findall(CODE.sub("", text)):
            target = ROOT / (SITE["target_of"](path, link) if link else path)
            assert target.exists(), f"{path}: {link}"
            assert target.is_relative_to(ROOT)
            assert not anchor or anchor in anchors(target), f"{path}: {link}#{anchor}"
            checked += 1
    assert checked > 300


def test_a_link_out_of_the_documentation_leads_to_a_page_of_the_site() -> None:
    uri = SITE["uri_of"](SITE["target_of"]("docs/agents.md", "../examples/python/agent_retry.py"))
    assert uri == "repository/examples/python/agent_retry.py.md"
    assert SITE["file_of"](uri) == "examples/python/agent_retry.py"
    assert SITE["uri_of"]("examples/scripts") == "repository/examples/scripts/index.md"
    assert SITE["file_of"]("repository/examples/scripts/index.md") == "examples/scripts"
    assert SITE["uri_of"]("docs/errors.md") == "errors.md"


def test_every_public_name_is_described_once() -> None:
    described = []
    for text in PAGES.values():
        for name in re.findall(r"^::: (\S+)", text, re.MULTILINE):
            described.append(name)
            module, _, last = name.rpartition(".")
            assert name in RECORDS or hasattr(importlib.import_module(module), last), name
    places = [
        module if module in RECORDS else f"{module}.{name}" for module, name in openrlhf.api.PUBLIC.values()
    ]
    assert sorted(described) == sorted({*RECORDS, *places})


@pytest.mark.processes
def test_the_site_builds_and_shows_what_github_shows(tmp_path: Path) -> None:
    """No warning, no broken link or anchor, and as many headings, lists, cells and code blocks on each page
    as a reader of GitHub's Markdown finds."""
    probe = "import markdown_it, material, mkdocstrings_handlers.python"
    if subprocess.run([PYTHON, "-c", probe], capture_output=True, timeout=120, check=False).returncode:
        pytest.skip(f"{PYTHON} has no MkDocs: run `make docs`")
    build = [PYTHON, ROOT / "tools" / "docs_site.py", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    plain = {path: text for path, text in PAGES.items() if "\n::: " not in text}
    wanted = subprocess.run(
        [PYTHON, "-c", RENDER],
        input=json.dumps(plain),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for path, text in json.loads(wanted.stdout).items():
        name = "" if path == "docs/index.md" else Path(path).relative_to("docs").with_suffix("")
        page = (tmp_path / name / "index.html").read_text()
        shown = re.search("<article.*?>(.*?)</article>", page, re.DOTALL)[1]
        assert counted(shown) == counted(text), path
        assert words(shown) == words(text), path
    for path in PAGES.keys() - plain.keys():
        assert (
            'class="doc doc-heading"'
            in (tmp_path / Path(path).relative_to("docs").with_suffix("") / "index.html").read_text()
        )


def counted(text: str) -> dict[str, int]:
    return {tag: len(re.findall(rf"<{tag}[ >]", text)) for tag in TAGS}


def words(text: str) -> str:
    """Returns the letters of a page, without the tags and the signs beside headings."""
    return re.sub(r"\s", "", html.unescape(re.sub(r"<[^>]+>", "", text)).replace("¶", ""))
