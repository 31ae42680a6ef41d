"""What the documentation's site needs beside its pages: links that lead out of docs/, and the navigation.

The pages are written to be read in the repository, where `../README.md` is a file. Here such files become pages of the
site, and links to them lead there. The index page's headings and tables are the navigation, so that a page is listed in
one place only.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[)#])")
_BLOCK = re.compile(r"^( *```.*?^ *```) *$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| \[([^\]]*)\]\(([^)]+)\)", re.MULTILINE)
_RENAMED = {"README.md": "overview.md"}
"""A README at the top of the site would be its index, which that of docs/ is."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the index page: a section for each heading, with the first link of each row.

    Pages in a folder of docs/ that the index does not list one by one make a section of their own.
    """
    _, *sections = re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)
    navigation: list[Any] = [{"Documentation": "README.md"}]
    for section in sections:
        heading, _, body = section.partition("\n")
        navigation.append({heading: [{title: _in_site("docs", link)} for title, link in _ROW.findall(body)]})
    listed = (ROOT / "docs" / "README.md").read_text()
    for folder in sorted(path for path in (ROOT / "docs").iterdir() if path.is_dir()):
        pages = [page.relative_to(ROOT / "docs").as_posix() for page in sorted(folder.rglob("*.md"))]
        if others := [page for page in pages if f"]({page})" not in listed]:
            navigation.append({folder.name.capitalize(): others})
    config.nav = navigation
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside of docs/ that a page links to, and that those link to."""
    queue = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    known: set[Path] = set()
    while queue:
        page = queue.pop()
        for link in _LINK.findall(_BLOCK.sub("", page.read_text())):
            target = (page.parent / link).resolve()
            if not target.is_file() or target.is_relative_to(ROOT / "docs") or target in known:
                continue
            known.add(target)
            files.append(File.generated(config, _site_path(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                queue.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the place that a file has in the site."""
    source = Path(page.file.abs_src_path or "")
    folder = posixpath.dirname(page.file.src_uri) or "."

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        if target.is_dir():
            target /= "README.md"
        return posixpath.relpath(_site_path(target), folder) if target.is_file() else link[0]

    parts = _BLOCK.split(markdown)
    return "".join(part if at % 2 else _LINK.sub(moved, part) for at, part in enumerate(parts))


def _in_site(folder: str, link: str) -> str:
    return _site_path((ROOT / folder / link).resolve())


def _site_path(target: Path) -> str:
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    path = target.relative_to(ROOT).as_posix()
    return _RENAMED.get(path, path)
