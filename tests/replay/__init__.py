"""The replay: faults of every kind on a real cluster, one after another, and what each of them cost (docs/proof.md).

    python -m tests.replay --seed 1 --faults 300 --minutes 140   # a part; the same command goes on where it ended
    python -m tests.replay --seed 1 --only 17                    # one fault alone
    make test-replay                                             # nine kinds, as a test

``trace`` says which fault comes when, from a seed or a file. ``workloads`` has what trains and what is around it.
``kinds`` does the fault, ``runner`` goes through the trace, and ``checks`` looks for what must not be left, ``alerts``
at what fires. ``results`` has what each fault led to; ``report`` makes tables and a picture of it. ``account`` says
where the time went by the trainers' own records, and ``both_accounts`` compares that with the operator's. ``trainer``
runs in the containers.
"""
