"""Metrics and logs.

Every room may call it; it calls none.
"""
