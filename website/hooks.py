"""Hooks of mkdocs: adds the generated reference, and files of the project that pages link to.

In the repository, pages link to files outside ``docs``, for example ``../ARCHITECTURE.md``. On the site, these files
are in the folder ``project``, and the links lead there. The theme would load a script from elsewhere for the search on
pages that were opened from a disk; ``offline-worker.js`` is in its place.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from website import reference  # noqa: E402  mkdocs loads this file by its path

_DOCS = "docs"
_PROJECT = "project"
#: Such pages are reached by links alone.
_BESIDE = InclusionLevel.NOT_IN_NAV
_SHIM = "https://unpkg.com/iframe-worker/shim"
_WORKER = "offline-worker.js"
_STYLES = "extra.css"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_BLOCK = re.compile(r"(^```.*?^```$)", re.S | re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is generated, and what is linked to outside ``docs``."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for name in (_WORKER, _STYLES):
        files.append(File.generated(config, f"assets/{name}", content=(Path(__file__).parent / name).read_bytes()))
    seen = set[str]()
    waiting = [f"{_DOCS}/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None]
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target not in seen and not target.startswith(f"{_DOCS}/"):
                seen.add(target)
                content = (ROOT / target).read_bytes()
                files.append(File.generated(config, f"{_PROJECT}/{target}", content=content, inclusion=_BESIDE))
                if target.endswith(".md"):
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between places of the repository into links between pages of the site."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    source = uri.removeprefix(f"{_PROJECT}/") if uri.startswith(f"{_PROJECT}/") else f"{_DOCS}/{uri}"

    def moved(link: re.Match[str]) -> str:
        target = _resolved(source, link[2])
        if target is None:
            return link[0]
        place = target.removeprefix(f"{_DOCS}/") if target.startswith(f"{_DOCS}/") else f"{_PROJECT}/{target}"
        return f"{link[1]}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{link[3] or ''}{link[4]}"

    # Blocks of code stay as they are.
    parts = _BLOCK.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Puts the project's own script in place of the one that is elsewhere."""
    return output.replace(_SHIM, posixpath.relpath(f"assets/{_WORKER}", posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages that are made of a template alone, as for an address that does not exist."""
    return output_content.replace(_SHIM, f"assets/{_WORKER}")


def _targets(page: str) -> Iterator[str]:
    text = _BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for link in _LINK.finditer(text):
        if (target := _resolved(page, link[2])) is not None:
            yield target


def _resolved(page: str, link: str) -> str | None:
    """Returns the file of the repository that a link of a page leads to. None if it leads elsewhere, or nowhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / target).is_dir():
        target = posixpath.join(target, "README.md")
    return target if (ROOT / target).is_file() else None
