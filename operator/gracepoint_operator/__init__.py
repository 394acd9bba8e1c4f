"""The Gracepoint operator: sees disruptions of gangs and notifies the library in their pods.

The command line imports it, and the library never does. It imports of the library only ``gracepoint.wire``.
"""
