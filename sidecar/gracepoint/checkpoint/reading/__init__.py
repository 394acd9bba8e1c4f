"""What a stored checkpoint holds, and its values read in parallel.

``loading``, ``metadata`` and ``verification`` call it. It calls ``format``, ``steps`` and ``storage``; it knows neither
devices nor what a caller wants.
"""
