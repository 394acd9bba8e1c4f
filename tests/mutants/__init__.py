"""Measures what the tests notice: changes one place of a decisive module at a time, and runs the tests that judge it.

    python -m tests.mutants                  # 30 mutants of each decisive module, always the same ones
    python -m tests.mutants --known          # those that no test noticed once
    python -m tests.mutants --all gracepoint.checkpoint.steps.lease
    python -m tests.mutants --list gracepoint.checkpoint.steps.lease

``judges.toml`` says which tests judge which module, which mutants change nothing that can be observed, and which ones
no test noticed once: these are always tried.
A mutant is detected if a test fails or a test run does not end in time. The exit code is 1 if less than 95% of a
module's mutants are detected.
"""
