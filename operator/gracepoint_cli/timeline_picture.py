"""A timeline as Vega-Lite charts, and as SVG; ``page`` has the charts in a page. Pure, but for the renderer.

There are up to three charts: the whole preemption in lanes; its save, enlarged, because a save usually takes a small
part of the time; and the losses of the runs over each other. The page makes each chart as wide as the window.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from gracepoint_cli.timeline import GANG, Span, SpanKind, Timeline

Chart = dict[str, Any]

#: The save has colours that people with any colour vision distinguish (Okabe and Ito). The rest has lighter ones.
COLOURS = {
    SpanKind.TRAINING: "#9ad0b5",
    SpanKind.NOTICE: "#b8b8b8",
    SpanKind.FREEZE: "#56b4e9",
    SpanKind.DRAIN: "#0072b2",
    SpanKind.SAVE: "#e69f00",
    SpanKind.COMMIT: "#d55e00",
    SpanKind.EXIT: "#a05195",
    SpanKind.WAIT: "#d9d9d9",
    SpanKind.PODS: "#e8d174",
    SpanKind.IMPORTS: "#c9b458",
    SpanKind.JOIN: "#8fbfe0",
    SpanKind.RESTORE: "#cc79a7",
    SpanKind.COMPILE: "#7f6fb0",
}
_DEADLINE = "#c00000"
_SVG_WIDTH = 860
_LANE_HEIGHT = 30
#: In a narrow chart, long names lose their middle: their end distinguishes pods.
_LABEL = (
    "width > 500 || length(datum.label) <= 26 ? datum.label : slice(datum.label, 0, 10) + '…' + slice(datum.label, -15)"
)
_TEXT_LENGTH = 64
#: How all charts look.
CONFIG: Chart = {
    "font": "DejaVu Sans, Arial, sans-serif",
    "background": "white",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "grid": True, "gridColor": "#eee"},
    "axisX": {"tickCount": {"expr": "ceil(width / 90)"}},
    "axisY": {"labelPadding": 8},
    "legend": {"labelFontSize": 12, "symbolType": "square"},
    "title": {
        "anchor": "start",
        "frame": "group",
        "fontSize": 14,
        "fontWeight": 600,
        "subtitleFontSize": 12,
        "subtitleColor": "#555",
    },
}
#: The stages that the enlarged chart of the save shows.
_OF_THE_SAVE = (SpanKind.FREEZE, SpanKind.DRAIN, SpanKind.SAVE, SpanKind.COMMIT)


def svg(timeline: Timeline) -> str:
    """Returns the picture as SVG, 860 pixels wide without the names of the lanes."""
    import vl_convert

    charts = [{**chart, "width": _SVG_WIDTH} for chart in charts_of(timeline)]
    charts[0]["title"] = {"text": timeline.title, "subtitle": "; ".join(timeline.facts)}
    spec = {
        "config": CONFIG,
        "padding": 16,
        "vconcat": charts,
        "spacing": 36,
        "resolve": {"scale": {"color": "independent", "x": "independent", "y": "independent"}},
    }
    return str(vl_convert.vegalite_to_svg(json.dumps(spec)))


def charts_of(timeline: Timeline) -> list[Chart]:
    """Returns the charts, each with a title and without a width."""
    charts = [_lanes(timeline)]
    save = [span for span in timeline.spans if span.lane == GANG and span.kind in _OF_THE_SAVE]
    if save:
        charts.append(_enlarged(save))
    if timeline.losses:
        charts.append(_losses(timeline))
    return charts


def _colours(kinds: set[SpanKind]) -> Chart:
    shown = [kind for kind in SpanKind if kind in kinds]
    return {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": [str(kind) for kind in shown], "range": [COLOURS[kind] for kind in shown]},
        "legend": {"orient": "bottom", "columns": {"expr": "width > 600 ? 9 : 2"}, "direction": "horizontal"},
    }


def _bars(spans: Sequence[Span], lanes: Sequence[str], x: Chart, field: str) -> Chart:
    values = [
        {
            "lane": span.lane,
            "text": span.text,
            "kind": str(span.kind),
            "start": round(span.start_s, 4),
            "end": round(span.end_s, 4),
            "duration": f"{span.end_s - span.start_s:.3f} s",
        }
        for span in spans
    ]
    return {
        "data": {"values": values},
        # The outline keeps a span of a millisecond visible.
        "mark": {
            "type": "bar",
            "height": {"band": 0.66},
            "stroke": {"expr": "scale('color', datum.kind)"},
            "strokeWidth": 1,
        },
        "encoding": {
            "y": {
                "field": field,
                "type": "nominal",
                "sort": list(lanes),
                "title": None,
                "scale": {"domain": list(lanes)},
                "axis": {
                    "labelLimit": {"expr": "width > 500 ? 260 : 170"},
                    "labelExpr": _LABEL,
                    "ticks": False,
                    "domain": False,
                    "grid": False,
                },
            },
            "x": x,
            "x2": {"field": "end"},
            "color": _colours({span.kind for span in spans}),
            "tooltip": [
                {"field": "lane", "title": "who"},
                {"field": "text", "title": "what"},
                {"field": "start", "title": "from (s)"},
                {"field": "end", "title": "to (s)"},
                {"field": "duration", "title": "took"},
            ],
        },
    }


def _lanes(timeline: Timeline) -> Chart:
    begin_s, end_s = timeline.bounds
    scale = {"domain": [round(begin_s, 3), round(end_s, 3)], "nice": False}
    x = {"field": "start", "type": "quantitative", "title": "seconds since the signal", "scale": scale}
    layers = [_bars(timeline.spans, timeline.lanes, x, "lane")]
    if timeline.deadline_s is not None:
        at = {"x": {"datum": round(timeline.deadline_s, 3), "type": "quantitative"}}
        rule = {"type": "rule", "color": _DEADLINE, "strokeWidth": 2, "strokeDash": [6, 3]}
        late = timeline.deadline_s > (begin_s + end_s) / 2
        label = {"type": "text", "text": "deadline", "color": _DEADLINE, "y": -7, "fontSize": 12, "fontWeight": 600}
        label |= {"align": "right" if late else "left", "dx": 4 if late else -4}
        layers += [{"data": {"values": [{}]}, "mark": mark, "encoding": at} for mark in (rule, label)]
    layers += _moments(timeline)
    return {"title": {"text": "The preemption"}, "height": {"step": _LANE_HEIGHT}, "layer": layers}


def _moments(timeline: Timeline) -> list[Chart]:
    begin_s, end_s = timeline.bounds
    values = [
        {
            "lane": moment.lane,
            "at": round(moment.at_s, 4),
            "text": moment.text,
            "short": _shortened(moment.text),
            "left": moment.at_s > (begin_s + end_s) / 2,
            # Two texts of a lane share its width.
            "room": 0.75 if [other.lane for other in timeline.moments].count(moment.lane) == 1 else 0.36,
        }
        for moment in timeline.moments
    ]
    place = {
        "y": {"field": "lane", "type": "nominal", "sort": list(timeline.lanes)},
        "x": {"field": "at", "type": "quantitative"},
        "tooltip": [{"field": "text", "title": "what"}, {"field": "at", "title": "at (s)"}],
    }
    point = {"type": "point", "shape": "diamond", "filled": True, "size": 110, "color": "#222", "opacity": 1}
    layers: list[Chart] = [{"data": {"values": values}, "mark": point, "encoding": place}]
    for on_left in (False, True):
        label = {"type": "text", "align": "right" if on_left else "left", "dx": -9 if on_left else 9, "fontSize": 12}
        # A white outline under the text keeps them legible on a bar.
        layers += [
            {
                "data": {"values": values},
                "transform": [{"filter": f"datum.left == {str(on_left).lower()}"}],
                "mark": {**mark, "limit": {"expr": "width * datum.room"}},
                "encoding": {**place, "text": {"field": "short"}},
            }
            for mark in ({**label, "stroke": "white", "strokeWidth": 3}, {**label, "color": "#222"})
        ]
    return layers


def _enlarged(save: Sequence[Span]) -> Chart:
    begin_s, end_s = min(span.start_s for span in save), max(span.end_s for span in save)
    steps = [
        Span(span.text, (span.start_s - begin_s) * 1000, (span.end_s - begin_s) * 1000, span.kind, span.text)
        for span in save
    ]
    names = [span.text for span in save]
    # Next to the last bar, its time needs space.
    scale_x = {"domainMin": 0, "domainMax": {"expr": f"{(end_s - begin_s) * 1000:.1f} * (width > 500 ? 1.25 : 1.7)"}}
    x = {"field": "start", "type": "quantitative", "title": "milliseconds", "scale": scale_x}
    layers = [_bars(steps, names, x, "text")]
    layers[0]["encoding"]["tooltip"] = [{"field": "text", "title": "what"}, {"field": "start"}, {"field": "end"}]
    layers[0]["encoding"]["color"]["legend"] = None
    label = [
        {"text": step.text, "end": step.end_s, "label": _milliseconds(step.end_s - step.start_s)} for step in steps
    ]
    layers.append(
        {
            "data": {"values": label},
            "mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 12, "color": "#222"},
            "encoding": {
                "y": {"field": "text", "type": "nominal", "sort": names},
                "x": {"field": "end", "type": "quantitative"},
                "text": {"field": "label"},
            },
        }
    )
    title = f"The save, enlarged: {end_s - begin_s:.3f} s since all were frozen"
    return {"title": {"text": title}, "height": {"step": _LANE_HEIGHT}, "layer": layers}


def _losses(timeline: Timeline) -> Chart:
    runs = list(dict.fromkeys(loss.run for loss in timeline.losses))
    by_run = [[loss for loss in timeline.losses if loss.run == run] for run in runs]
    layers: list[Chart] = []
    # The first run is a broad line, and the others are thin lines on it: where they are equal, both are seen.
    styles: list[Chart] = [
        {"strokeWidth": 7, "opacity": 0.45},
        {"strokeWidth": 1.5},
        {"strokeWidth": 1.5, "strokeDash": [4, 2]},
    ]
    for losses, style in zip(by_run, styles, strict=False):
        values = [{"run": loss.run, "step": loss.step, "loss": loss.value} for loss in losses]
        layers.append(
            {
                "data": {"values": values},
                "mark": {"type": "line", **style},
                "encoding": {
                    "x": {"field": "step", "type": "quantitative", "title": "training step", "scale": {"nice": False}},
                    "y": {"field": "loss", "type": "quantitative", "title": "loss", "scale": {"zero": False}},
                    "color": {
                        "field": "run",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": runs, "range": ["#56b4e9", "#222222", "#d55e00"][: len(runs)]},
                        "legend": {"orient": "bottom", "symbolType": "stroke", "labelLimit": 400},
                    },
                },
            }
        )
    if timeline.saved_step is not None:
        at = {"x": {"datum": timeline.saved_step, "type": "quantitative"}}
        rule = {"type": "rule", "color": _DEADLINE, "strokeDash": [6, 3]}
        text = f"step {timeline.saved_step} saved"
        steps = [loss.step for loss in timeline.losses]
        late = timeline.saved_step > (min(steps) + max(steps)) / 2
        label = {"type": "text", "text": text, "y": 8, "fontSize": 12, "color": _DEADLINE}
        label |= {"align": "right" if late else "left", "dx": -6 if late else 6}
        layers += [{"data": {"values": [{}]}, "mark": mark, "encoding": at} for mark in (rule, label)]
    return {"title": {"text": "Losses of both runs"}, "height": 220, "layer": layers}


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[: _TEXT_LENGTH - 1]}…"


_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


def page(timeline: Timeline) -> str:
    """Returns a page with the charts, what their colours mean, and all events as a table. It loads nothing else."""
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
