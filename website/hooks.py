"""Hooks of mkdocs: adds the generated reference, and files of the project that pages link to.

In the repository, pages link to files outside ``docs``, for example ``../ARCHITECTURE.md``. On the site, these files
are in the folder ``project``, and the links lead there. The theme would load a script from elsewhere for the search on
pages that were opened from a disk; ``offline-worker.js`` is in its place. Long names may be broken where a reader would
break them: ``GRACEPOINT_`` / ``SAVE_`` / ``EVERY_`` / ``STEPS``.
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
#: The first line of a field in the list of a policy's fields, and the last line of a row of the catalogue. Each is on a
#: line of its own in the file, and stays so on the site.
_FIELD = re.compile(r"^(- \*\*`[\w.]+`\*\* \([^`]*?\))(?=\n  \S)", re.M)
_ROW_END = re.compile(r"(?=\n  \*[A-Z])")
_PART = re.compile(r"(<pre\b.*?</pre>|<td\b.*?</td>)", re.S)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
#: An entity, which stays whole, or a place between two characters at which a name may be broken.
_BREAK = re.compile(r"&#?\w+;|(?<=[\w/][._/,=(\[])(?=[A-Za-z{])")
#: In a table, whose columns are narrow, it may also be broken before a capital letter.
_BREAK_IN_TABLE = re.compile(_BREAK.pattern + "|(?<=[a-z0-9])(?=[A-Z])")
#: Characters of a name that is long, in the text and in a table. Shorter ones are not broken.
_LONG, _LONG_IN_TABLE = 24, 16
_FLAG = re.compile(r"(?<![\w-])--?\w[\w-]*")


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

    if uri == "policy.md":
        markdown = _FIELD.sub(r"\1  ", markdown)
    elif uri == "signals.md":
        markdown = _ROW_END.sub("  ", markdown)
    # Blocks of code stay as they are.
    parts = _BLOCK.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Puts the project's own script in place of the one that is elsewhere, and lets names in the text be broken."""
    output = "".join(map(_with_breaks, _PART.split(output)))
    return output.replace(_SHIM, posixpath.relpath(f"assets/{_WORKER}", posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages that are made of a template alone, as for an address that does not exist."""
    return output_content.replace(_SHIM, f"assets/{_WORKER}")


def _with_breaks(part: str) -> str:
    if part.startswith("<pre"):
        return part
    places, long = (_BREAK_IN_TABLE, _LONG_IN_TABLE) if part.startswith("<td") else (_BREAK, _LONG)

    def broken(name: re.Match[str]) -> str:
        return places.sub(lambda place: place[0] or "<wbr>", name[0]) if len(name[0]) >= long else name[0]

    def marked(code: re.Match[str]) -> str:
        return _FLAG.sub(r'<span class="whole">\g<0></span>', re.sub(r"\S+", broken, code[0]))

    return _CODE.sub(marked, part)


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
