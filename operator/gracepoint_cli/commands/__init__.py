"""One module for each command: its arguments, what it reads, and how its answer is printed."""
