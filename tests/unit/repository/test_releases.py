"""Citation, templates and workflows of a release, and one home for the version."""

import re
import tomllib
from pathlib import Path

import yaml

from openrlhf.tools.doctor.flags import doctor_parser

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")
}


def commands(name: str) -> str:
    """Returns all shell commands of a workflow."""
    steps = [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


def test_the_version_has_one_home() -> None:
    """A tag, and without git the last release that the notes know."""
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    last = PROJECT["tool"]["setuptools_scm"]["fallback_version"]
    notes = (ROOT / "docs" / "release_notes.md").read_text()
    assert re.search(rf"^## (After )?{re.escape(last)}$", notes, re.MULTILINE)
    assert not re.search(r"^__version__ =", (ROOT / "openrlhf" / "__init__.py").read_text(), re.MULTILINE)


def test_a_citation_has_what_its_schema_requires() -> None:
    """CFF 1.2.0, https://citation-file-format.github.io: cff-version, message, title and authors."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["type"] == "software"
    assert citation["title"] == PROJECT["project"]["name"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert all(author["name"] for author in citation["authors"])
    assert "version" not in citation  # the tag has it


def test_forms_ask_for_the_report() -> None:
    assert [form.name for form in FORMS] == ["bug.yml", "proposal.yml"]
    for form in FORMS:
        content = yaml.safe_load(form.read_text())
        assert content["name"] and content["description"]
        ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) and all(part["attributes"] for part in content["body"])
    asked = FORMS[0].read_text()
    assert "openrlhf doctor RUN --report" in asked
    assert doctor_parser().parse_args(["RUN", "--report"]).report
    pull_request = (ROOT / ".github" / "pull_request_template.md").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert (
        "CONTRIBUTING.md#evidence-for-a-change" in pull_request
        and "\n## Evidence for a change\n" in contributing
    )


def test_what_is_built_is_installed_and_used_before_it_is_released() -> None:
    install = (ROOT / ".ci" / "install").read_text()
    assert "-m build --outdir" in install and 'pip install "$wheel"' in install
    assert "bash .ci/install" in commands("tests") and "DIST=dist bash .ci/install" in commands("release")
    release = WORKFLOWS["release"]
    assert (
        release[True]["push"]["tags"] and release["jobs"]["release"]["needs"] == "build"
    )  # YAML reads `on` as true
    checkout = release["jobs"]["build"]["steps"][0]
    assert checkout["with"]["fetch-depth"] == 0  # else no tag is found
    assert "pypi-publish" not in str(release)  # the name on the index is another project's


def test_the_page_for_assistants_names_what_exists() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    targets = re.findall(r"`make (\w+)`", text)
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert all((ROOT / path).exists() for path in re.findall(r"`((?:openrlhf|docs)/[\w./]+)`", text))
