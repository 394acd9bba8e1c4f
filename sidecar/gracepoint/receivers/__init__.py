"""How notices arrive and how messages go back: the operator's stream, SIGTERM and the cloud's metadata.

All notices go into one ``Mailbox``. ``preemption`` and ``session`` call this package; it calls ``wire``. Standard
library only.
"""

from gracepoint.receivers.channel import ChannelError, OperatorConnection
from gracepoint.receivers.hints import Hints
from gracepoint.receivers.mailbox import Disruption, Mailbox, Receiver
from gracepoint.receivers.metadata import MetadataWatchers
from gracepoint.receivers.operator import Operator
from gracepoint.receivers.sender import Sender
from gracepoint.receivers.sigterm import SigtermReceiver
from gracepoint.receivers.subscription import OperatorSubscriber

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
