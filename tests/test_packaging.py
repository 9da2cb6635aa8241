"""Files of a release: metadata, the page on PyPI, workflows, templates. `.ci/wheel` checks the distributions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import nucleate as nc

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WEIGHTS = tomllib.loads((ROOT / "packages" / "draft-weights" / "pyproject.toml").read_text("utf-8"))
URL = PROJECT["project"]["urls"]["Homepage"]
RAW = URL.replace("//github.com", "//raw.githubusercontent.com")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TEXTS = (".md", ".py", ".ipynb", ".toml", ".yml", ".yaml", ".service", "Makefile", "Dockerfile")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))
    return loaded


def check_schema(schema: str, *files: Path) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_workflows_and_issue_forms_are_valid() -> None:
    check_schema("vendor.github-workflows", *WORKFLOWS)
    check_schema("custom.github-workflows-require-timeout", *WORKFLOWS)
    check_schema("vendor.github-issue-forms", *[form for form in FORMS if form.stem != "config"])
    check_schema("vendor.github-issue-config", *[form for form in FORMS if form.stem == "config"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_least_privileges_and_pinned_actions(path: Path) -> None:
    found = workflow(path.name)
    assert found["permissions"] in ({}, {"contents": "read"})
    for job in found["jobs"].values():
        writes = [scope for scope, access in job.get("permissions", {}).items() if access == "write"]
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", action) for action in uses)
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert not any("${{" in script for script in runs)  # nothing that others write becomes a part of a script
        if writes:  # a job that may write does not run the code of the repository
            assert not any("actions/checkout" in action for action in uses)


def test_the_matrix_has_the_versions_of_the_classifiers() -> None:
    prefix = "Programming Language :: Python :: 3."
    versions = [c.removeprefix(prefix[:-2]) for c in PROJECT["project"]["classifiers"] if c.startswith(prefix)]
    assert workflow("ci.yml")["jobs"]["fast"]["strategy"]["matrix"]["python"] == versions
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}" == WEIGHTS["project"]["requires-python"]


def test_versions_agree() -> None:
    assert CITATION["version"] == nc.__version__
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    [date] = re.findall(rf"^## \[{re.escape(nc.__version__)}\] - (\S+)", changes, re.MULTILINE)
    assert date in {"unreleased", str(CITATION["date-released"])}
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    for tool in ("build", "hatchling", "hatch-fancy-pypi-readme", "twine", "check-wheel-contents", "check-jsonschema"):
        assert re.search(rf"^{tool}==", constraints, re.MULTILINE)


def test_there_is_one_url() -> None:
    texts = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "SECURITY.md", "README.md", "CHANGELOG.md")]
    for path in (*texts, *WORKFLOWS, *FORMS):
        for owner in re.findall(r"github(?:usercontent)?\.com/([\w-]+/nucleate)\b", path.read_text("utf-8")):
            assert URL.endswith(owner)


def test_the_links_of_the_wheel_exist() -> None:
    targets = [url.removeprefix(f"{URL}/blob/main/") for url in PROJECT["project"]["urls"].values() if "/blob/" in url]
    assert len(targets) >= 2
    for path, _, anchor in (target.partition("#") for target in targets):
        headings = re.findall(r"^#+ (.*)", (ROOT / path).read_text("utf-8"), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


def tracked_texts() -> dict[str, str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in done.stdout.split("\0") if name.endswith(TEXTS) and not name.startswith("tests/")]
    if done.returncode or not names:
        pytest.skip("this is not a git repository")
    return {name: (ROOT / name).read_text("utf-8") for name in names if (ROOT / name).is_file()}


def test_nothing_is_installed_from_an_index_that_lacks_it() -> None:
    wrong = [
        f"{name}: {line}"
        for name, text in tracked_texts().items()
        for line in re.findall(r"pip install[^\n`]*?['\" ]nucleate(?:\[[\w,-]+\])?(?=['\"` \n]|$)", text)
    ]
    assert wrong == []


def test_extras_that_are_named_exist() -> None:
    named: dict[str, str] = {}
    for name, text in tracked_texts().items():
        lists = re.findall(r"['\"]\.\[([a-z][\w,-]*)\]['\"]", text)
        single = re.findall(r"\bextras? [`'\"]([\w-]+)[`'\"]|\binstall_extra\('([\w-]+)'\)", text)
        for extra in [*(extra for each in lists for extra in each.split(",")), *(a or b for a, b in single)]:
            named[extra] = name
    assert len(named) > 8
    assert set(named) <= set(PROJECT["project"]["optional-dependencies"]), named


def long_description() -> str:
    text = (ROOT / "README.md").read_text("utf-8")
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_the_links_of_the_page_on_pypi_are_absolute() -> None:
    page = long_description()
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)", page) + re.findall(r"(<img)[^>]* src=\"([^\"]+)", page)
    assert len(targets) > 20
    for picture, target in targets:
        assert target.startswith(("https://", "#"))
        file = re.fullmatch(rf"(?:{URL}/blob|{RAW})/main/([^#]+).*", target)
        if file:
            assert (ROOT / file[1]).exists()
            assert ("raw." in target) == bool(picture)


def test_templates_name_commands_and_files_that_exist() -> None:
    template = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text("utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", template))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    forms = "".join(form.read_text("utf-8") for form in FORMS)
    for page in re.findall(r"docs/\w+\.md", forms):
        assert (ROOT / page).is_file()
