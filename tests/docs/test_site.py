"""The documentation as a site: it builds without a warning, asks nobody for anything, and has every public name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import perfladder as pl
from perfladder import backend, kernels

ROOT = Path(__file__).parents[2]
EXTERNAL = re.compile(r"^(https?:)?//")


class Addresses(HTMLParser):
    """Every address in a page, with the tag and the attribute that name it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = ((tag, name, value or "") for name, value in attrs)
        self.found += [entry for entry in named if entry[1] in ("href", "src", "srcset", "data", "poster", "action")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def addresses(site: Path) -> list[tuple[Path, str, str, str]]:
    pages = sorted(site.rglob("*.html"))
    return [(page, *entry) for page in pages for entry in Addresses(page.read_text()).found]


@pytest.mark.slow
def test_the_site_has_every_page_and_what_lies_outside_of_docs(site):
    expected = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    expected = {path.with_name("index.html") if path.stem == "README" else path for path in expected}
    missing = {path.as_posix() for path in expected if not (site / path).is_file()}
    assert missing == set()
    for name in ("overview.html", "SKILL.html", "LICENSE", "examples/serving/serve.py", "search/search_index.json"):
        assert (site / name).is_file(), name


@pytest.mark.slow
def test_the_site_asks_nobody_for_anything(site):
    asked = [entry[1:] for entry in addresses(site) if EXTERNAL.match(entry[3]) and entry[1:3] != ("a", "href")]
    assert asked == []
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()) == [], sheet


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file(site):
    for page, _, _, address in addresses(site):
        path = unquote(address.partition("#")[0])
        if path and not re.match(r"^[a-z]+:|^//", path) and page.name != "404.html":
            assert (page.parent / path).exists(), f"{page.relative_to(site)}: {address}"


@pytest.mark.slow
def test_the_navigation_is_that_of_the_index(site):
    overview = (site / "overview.html").read_text()
    for heading in re.findall(r"^## (.+)$", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE):
        assert heading in overview


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    named = re.findall(r"^::: perfladder\.([\w.]+)$", text, flags=re.MULTILINE)
    public = {name for name in pl.__all__ if name not in ("__version__", "backend", "kernels")}
    public |= {f"backend.{name}" for name in backend.__all__} | {f"kernels.{name}" for name in kernels.__all__}
    assert public <= set(named)
    assert len(named) == len(set(named))


def test_links_out_of_docs_are_turned_and_code_is_left_alone():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)

    class File:
        abs_src_path = str(ROOT / "docs" / "mlflow.md")
        src_uri = "mlflow.md"

    class Page:
        file = File

    text = "[a](../README.md#limits) [b](tuning.md) [c](https://pytorch.org)\n```text\n[d](../README.md)\n```\n"
    turned = text.replace("(../README.md#limits)", "(overview.md#limits)")
    assert pages.on_page_markdown(text, Page, None, None) == turned
