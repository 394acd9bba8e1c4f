"""The timeline of a preemption: lanes for node, operator, gang and each process, with the deadline as a line.

* ``model``: what a timeline contains, the stages of a preemption, and the timeline of a Preemption of the API;
* ``terminal``: the timeline as text;
* ``picture``: the timeline as Vega-Lite charts, as SVG, and as a page that needs nothing else.

``timeline_command`` calls it, and ``drill`` uses the names of the stages. The demo draws its run with the same modules,
and adds what it has measured itself.
"""
