"""Type handlers: they save and restore leaves by type, with Orbax's interface.

Users call it. It calls the same packages as the checkpointers do, without a commit and without a manifest.
"""
