"""One module for each command: its arguments, what it reads, and how its answer is printed.

``app`` alone calls them. They call all other rooms of the command line.
"""
