"""A timeline as a page with everything in it: the charts, what their colours mean, and all events as a table.

The page makes each chart as wide as the window. Pure, but for the renderer.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable

from gracepoint_cli.timeline.model import SpanKind, Timeline
from gracepoint_cli.timeline.picture import COLOURS, CONFIG, Chart, charts_of

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


def page(timeline: Timeline) -> str:
    """Returns a page that loads nothing else, as wide as its window."""
    import vl_convert

    charts = charts_of(timeline)
    specs = [{**chart, "config": CONFIG, "width": "container", "title": None} for chart in charts]
    # The colours are explained above the chart, in as many lines as the window needs.
    specs[0]["layer"][0]["encoding"]["color"]["legend"] = None
    places = [
        f'<section><h2>{html.escape(_heading(c))}</h2>{{0}}<div id="c{i}"></div></section>'
        for i, c in enumerate(charts)
    ]
    legend = _legend(kind for kind in SpanKind if any(span.kind is kind for span in timeline.spans))
    # A text of a Kubernetes object must not end the script, nor begin another.
    data = json.dumps(specs).replace("<", "\\u003c")
    return _PAGE.format(
        title=html.escape(timeline.title),
        facts="".join(f"<li>{html.escape(fact)}</li>" for fact in timeline.facts),
        places="\n".join(place.format("" if number else legend) for number, place in enumerate(places)),
        events=_events(timeline),
        font=_FONT,
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
        script=_EMBED.replace("SPECS", data),
    )


def _heading(chart: Chart) -> str:
    return str(chart["title"]["text"])


def _legend(kinds: Iterable[SpanKind]) -> str:
    colours = "".join(f'<li><i style="background: {COLOURS[kind]}"></i>{html.escape(kind)}</li>' for kind in kinds)
    return f'<ul class="legend">{colours}</ul>'


def _events(timeline: Timeline) -> str:
    return "".join(
        f"<tr><td>{event.at_s:.3f} s</td><td>{html.escape(event.lane)}</td><td>{html.escape(event.text)}</td></tr>"
        for event in timeline.events
    )


_EMBED = """
const specs = SPECS;
specs.forEach((spec, i) => vegaEmbed(`#c${i}`, spec, {actions: false, renderer: "svg"}));
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: {font}; color: #222; margin: 0 auto; padding: 1rem; max-width: 75rem; box-sizing: border-box; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1rem; margin: 1.5rem 0 .25rem; }}
ul {{ display: flex; flex-wrap: wrap; gap: .25rem .5rem; list-style: none; padding: 0; }}
li {{ background: #f0f4f8; border-radius: 1rem; padding: .15rem .7rem; font-size: .9rem; }}
.legend li {{ background: none; padding: 0 .4rem 0 0; font-size: .8rem; }}
.legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .35em; }}
section > div {{ width: 100%; }}
table {{ border-collapse: collapse; font-size: .85rem; }} td {{ padding: .15rem .75rem .15rem 0; vertical-align: top; }}
td:first-child {{ text-align: right; white-space: nowrap; }} td {{ overflow-wrap: break-word; }}
td:last-child {{ overflow-wrap: anywhere; }}
</style></head>
<body><h1>{title}</h1><ul>{facts}</ul>
{places}
<section><h2>What happened when, in seconds since the signal</h2><table>{events}</table></section>
<script type="module">{library}</script>
<script type="module">{script}</script></body></html>
"""
