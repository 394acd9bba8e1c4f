"""A picture of the dashboard, drawn by Grafana's own components in a headless Chromium.

It is not a whole Grafana: frames, axes, legends, units and colours of the panels are those of ``@grafana/ui``, but the
page that holds them, and the queries, are ours. Needs npm, which loads the components once, and Chromium.

Processes: npm, esbuild and Chromium, one after the other.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.dashboard import panels, recording
from tests.testcluster import cache

_PAGE = Path(__file__).parent / "page"
_SOURCES = ("package.json", "package-lock.json", "page.jsx")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_INSTALL_S = 900
_BUNDLE_S = 300
_DRAW_S = 300
_WIDTH_PX = 1680
_CELL_PX = 38


class PictureError(Exception):
    """A program that is needed is missing, or failed."""


def draw(url: str, picture: Path) -> None:
    """Draws all panels.

    Args:
        url: Prometheus.
        picture: The PNG file to write.

    Raises:
        PictureError: See there.
    """
    browser = _program(*_BROWSERS)
    bundle = _bundle()
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels.DASHBOARD["panels"]) * _CELL_PX
    data = {
        "dashboard": panels.DASHBOARD,
        "results": {panel["id"]: _results(url, panel) for panel in panels.panels()},
        "beginMs": recording.BEGIN_S * 1000,
        "endMs": recording.END_S * 1000,
        "stepMs": panels.STEP_S * 1000,
        "widthPx": _WIDTH_PX,
    }
    page = bundle / "page.html"
    page.write_text(
        '<!doctype html><meta charset="utf-8"><body style="margin:0;background:#f4f5f5;font-family:sans-serif">'
        f'<div id="dashboard"></div><script>window.gracepoint = {json.dumps(data)}</script>'
        '<link rel="stylesheet" href="page.css"><script src="page.js"></script>'
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    _run(
        _DRAW_S,
        browser,
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=30000"),
        *(f"--window-size={_WIDTH_PX},{height}", f"--screenshot={picture.resolve()}", page.as_uri()),
    )
    if not picture.exists():
        raise PictureError(f"{browser} ended without a picture at {picture}")


def _results(url: str, panel: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"target": target, "legend": panels.legend(target, series), "values": series["values"]}
        for target in panel["targets"]
        for series in panels.query(url, target["expr"])
    ]


def _bundle() -> Path:
    """The folder of the page's script and style sheet, with all imports. Made once for each state of its sources."""
    key = cache.digest(*((_PAGE / name).read_text() for name in _SOURCES))
    folder = cache.folder("dashboard") / key
    bundle = folder / "bundle"
    with cache.lock(f"dashboard-{key}"):
        if not bundle.exists():
            npm = _program("npm")
            folder.mkdir(parents=True, exist_ok=True)
            for name in _SOURCES:
                shutil.copy(_PAGE / name, folder)
            _run(_INSTALL_S, npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)
            esbuild = str(folder / "node_modules" / ".bin" / "esbuild")
            flags = ("--bundle", "--minify", "--jsx=automatic", "--define:process.env.NODE_ENV='production'")
            loaders = [f"--loader:.{ending}=dataurl" for ending in ("svg", "png", "woff", "woff2", "ttf")]
            _run(_BUNDLE_S, esbuild, "page.jsx", *flags, *loaders, "--outdir=part", cwd=folder)
            shutil.rmtree(folder / "node_modules")
            (folder / "part").rename(bundle)
    return bundle


def _program(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    raise PictureError(f"found none of {', '.join(names)}, which the picture needs")


def _run(timeout_s: float, *argv: str, cwd: Path | None = None) -> None:
    done = subprocess.run(argv, cwd=cwd, timeout=timeout_s, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PictureError(f"{argv[0]} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
