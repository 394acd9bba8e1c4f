"""Steps in stores that cannot rename: a step is committed when it has a manifest.

``commit``, ``recovery``, ``listing`` and ``retention`` call it. It calls ``records``, ``format`` and ``storage``.
"""
