"""What follows from the state of the cluster: pure functions of plain data and a time.

``channel``, ``recording`` and the controller call them. They call ``model``, ``signals`` and
``resources``; they have no clock, no network and no threads.
"""
