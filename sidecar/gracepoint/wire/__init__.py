"""What the operator and the library say to each other: names and messages. Standard library only.

``names`` holds labels, paths and environment variables; ``messages`` the JSON messages of the channel.
"""
