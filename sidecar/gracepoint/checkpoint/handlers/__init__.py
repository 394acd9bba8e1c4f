"""Type handlers: leaves saved and restored by their type, in Orbax's words.

Users call it. It calls the same rooms as the checkpointers do, without a commit and without a manifest.
"""
