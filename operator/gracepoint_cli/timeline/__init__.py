"""The timeline of a preemption: lanes for node, operator, gang and each process, with the deadline as a line.

* ``stages``: the stages of a preemption, in words;
* ``model``: what a timeline contains, whoever made it;
* ``of_preemption``: the timeline of any Preemption, from the API's objects;
* ``terminal``: the timeline as text;
* ``picture``: the timeline as Vega-Lite charts, and as SVG;
* ``page``: the charts and all events in a page that needs nothing else.

``timeline_command`` calls it, and ``drill`` uses the words of ``stages``. The demo draws its run with the
same modules, and adds what it has measured itself.
"""
