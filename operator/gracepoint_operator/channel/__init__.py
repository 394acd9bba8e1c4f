"""The HTTPS endpoint that pods subscribe to: who they are, what they are notified of, what they report.

The server serves it. It calls ``cache`` to know, ``decisions`` to judge, and ``recording`` to write.
"""
