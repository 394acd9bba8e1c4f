"""What people are told: statuses, conditions and Events of preemptions, policies and stalls.

``recording``, ``channel`` and the command line call it. It calls ``model``, ``signals`` and ``resources``. All of it is
pure.
"""
