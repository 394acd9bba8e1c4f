"""Keeps compiled programs beside the checkpoints, so that the next start of a job does not compile them again.

JAX asks a cache for each program before it compiles the program, and gives the cache each program that it has compiled
(``jax_hooks``). ``program_cache`` answers from the store. ``listing`` says which programs a process may use,
``downloads`` and ``uploads`` read and write them, and ``cleaning`` deletes those that are not used any more.
``program_folders`` names the folders of the store, and ``program_file`` is the form of one file. ``opening`` puts all
of this together for ``attach``.

Nothing here raises into the training: a program that cannot be read is compiled, and the log says why.
"""
