"""How notices arrive and how messages go back: the operator's stream, SIGTERM and the cloud's metadata.

All notices go into one ``Mailbox``. ``preemption`` and ``session`` call this package; it calls ``wire``. Standard
library only.
"""

from gracepoint.receivers.channel import ChannelError, OperatorConnection, OperatorSubscriber, Sender
from gracepoint.receivers.mailbox import Disruption, Hints, Mailbox, Receiver
from gracepoint.receivers.metadata import MetadataWatchers
from gracepoint.receivers.operator import Operator
from gracepoint.receivers.sigterm import SigtermReceiver

__all__ = [
    "ChannelError",
    "Disruption",
    "Hints",
    "Mailbox",
    "MetadataWatchers",
    "Operator",
    "OperatorConnection",
    "OperatorSubscriber",
    "Receiver",
    "Sender",
    "SigtermReceiver",
]
