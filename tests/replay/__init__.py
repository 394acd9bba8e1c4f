"""The replay: a trace of faults of every kind, on a real cluster, and what each of them cost."""
