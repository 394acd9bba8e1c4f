"""The soak: one training job on a real cluster, disrupted at random in every way again and again.

    make soak                                     # 100 disruptions
    python -m tests.soak --disruptions 9 --seed 7
    make test-soak                                # each kind once, as a test: ten minutes

``plan`` says what happens when, from a seed. ``kinds`` does it. ``whole`` makes the cluster, ``runner`` goes through
the plan, and ``checks`` looks for what must not be there in the end. ``account`` says where the time went by the
trainers' own records, and ``both_accounts`` compares that with the operator's. ``trainer`` runs in the containers.
"""
