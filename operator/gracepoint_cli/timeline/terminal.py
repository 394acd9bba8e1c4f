"""A timeline as text: a line for each lane, then each stage with its seconds. Pure."""

from __future__ import annotations

from rich.text import Text

from gracepoint.wire.messages import one_line
from gracepoint_cli.timeline.model import SpanKind, Timeline

_COLOURS = {
    SpanKind.TRAINING: "green",
    SpanKind.NOTICE: "bright_black",
    SpanKind.FREEZE: "cyan",
    SpanKind.DRAIN: "blue",
    SpanKind.SAVE: "magenta",
    SpanKind.COMMIT: "bright_magenta",
    SpanKind.EXIT: "red",
    SpanKind.PODS: "yellow",
    SpanKind.IMPORTS: "bright_yellow",
    SpanKind.JOIN: "bright_cyan",
    SpanKind.RESTORE: "bright_blue",
    SpanKind.COMPILE: "bright_red",
}
_LETTERS = {
    SpanKind.TRAINING: "=",
    SpanKind.NOTICE: "-",
    SpanKind.FREEZE: "f",
    SpanKind.DRAIN: "d",
    SpanKind.SAVE: "s",
    SpanKind.COMMIT: "c",
    SpanKind.EXIT: "x",
    SpanKind.PODS: "p",
    SpanKind.IMPORTS: "i",
    SpanKind.JOIN: "j",
    SpanKind.RESTORE: "r",
    SpanKind.COMPILE: "o",
}
_NARROWEST = 20


def lines(timeline: Timeline, width: int, *, colours: bool) -> list[Text]:
    """Returns the lines.

    Args:
        timeline: What to show.
        width: Columns of the terminal.
        colours: Whether spans are distinguished by colour. Without, by letters.
    """
    names = {lane: _shortened(one_line(lane), max(width // 3, _NARROWEST)) for lane in timeline.lanes}
    labels = max(map(len, names.values()), default=0)
    columns = max(width - labels - 3, _NARROWEST)
    begin_s, end_s = timeline.bounds

    def column(seconds: float) -> int:
        return min(int((seconds - begin_s) / (end_s - begin_s) * columns), columns - 1)

    texts = [Text(one_line(timeline.title), style="bold"), Text(one_line("; ".join(timeline.facts))), Text()]
    deadline = None if timeline.deadline_s is None else column(timeline.deadline_s)
    for lane in timeline.lanes:
        cells: list[tuple[str, str]] = [(" ", "")] * columns
        for span in timeline.spans:
            if span.lane == lane:
                sign = "█" if colours else _LETTERS[span.kind]
                for at in range(column(span.start_s), column(span.end_s) + 1):
                    cells[at] = (sign, _COLOURS[span.kind])
        for moment in timeline.moments:
            if moment.lane == lane:
                cells[column(moment.at_s)] = ("◆" if colours else "!", "bold")
        if deadline is not None:
            cells[deadline] = ("│" if colours else "|", "red")
        line = Text(f"{names[lane]:>{labels}}  ")
        for sign, style in cells:
            line.append(sign, style=style)
        texts.append(line)
    texts.append(Text(" " * (labels + 2) + _scale(begin_s, end_s, columns), style="bright_black"))
    texts.append(_legend(timeline, colours=colours))
    texts.append(Text())
    texts += [
        Text(one_line(f"{event.at_s:10.3f} s  {event.lane}{': ' if event.lane else ''}{event.text}"))
        for event in timeline.events
    ]
    return texts


def _scale(begin_s: float, end_s: float, columns: int) -> str:
    begin_label, right = f"{begin_s:.1f} s", f"{end_s:.1f} s"
    return begin_label + right.rjust(columns - len(begin_label))


def _shortened(text: str, limit: int) -> str:
    """Returns the text, without its middle if it is too long: the end of a pod's name distinguishes it from others."""
    if len(text) <= limit:
        return text
    begin = (limit - 1) // 2
    return f"{text[:begin]}…{text[len(text) - (limit - 1 - begin) :]}"


def _legend(timeline: Timeline, *, colours: bool) -> Text:
    legend = Text()
    for kind in sorted({span.kind for span in timeline.spans}, key=list(SpanKind).index):
        legend.append("█ " if colours else f"{_LETTERS[kind]} ", style=_COLOURS[kind]).append(f"{kind}   ")
    if timeline.moments:
        legend.append("◆ " if colours else "! ", style="bold").append("event   ")
    if timeline.deadline_s is not None:
        legend.append("│ " if colours else "| ", style="red").append("deadline")
    return legend
