"""Keeps compiled programs beside the checkpoints, so that the next start of a job does not compile them again.

JAX asks a cache for each program before it compiles it, and gives it each program that it has compiled (``jax_hooks``).
``program_cache`` answers from the store. ``program_folders`` names the folders of the store, ``program_file`` is the
form of one file, and ``cleaning`` deletes what is not used any more. ``opening`` puts them together for ``attach``.

Nothing here raises into the training: a program that cannot be read is compiled, and the log says why.
"""
