"""What the operator and the library send each other. Standard library only; both sides call it, and it calls nothing.

``names`` holds labels, paths and environment variables; ``messages`` the JSON messages of the channel, and ``codec``
how they are read and written.
"""
