"""The channel's port: its thread and event loop, its TLS connections, and how they are closed.

``server`` starts it. It serves the routes of ``channel`` with aiohttp.
"""
