"""The little of systemd-logind that a kubelet asks before its machine goes down, on a bus of the machine's own.

A kubelet takes a delay lock from logind (``Inhibit``) and then waits for ``PrepareForShutdown``, upon which it says
that the node is not ready and ends its pods gracefully. This is run as a program inside of a node's machine: ``serve``
starts the system bus and answers on it until the machine ends, ``announce`` says that the machine goes down, or stays
after all.

Processes: dbus-daemon, which ends with the machine. Threads: none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jeepney import DBusAddress, HeaderFields, Message, MessageType, new_error, new_method_return, new_signal
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import DBusConnection, open_dbus_connection

#: Where a kubelet looks for the system bus.
_SOCKET = Path("/run/dbus/system_bus_socket")
_NAME = "org.freedesktop.login1"
_MANAGER = DBusAddress("/org/freedesktop/login1", interface=f"{_NAME}.Manager")
#: Longer than any kubelet asks for, which would otherwise write into this host's /etc/systemd.
_DELAY_MAX_US = 3600 * 1_000_000
READY = "logind answers"
#: Nobody but this machine's own processes reaches the bus.
_CONFIGURATION = f"""\
<busconfig>
  <type>system</type>
  <listen>unix:path={_SOCKET}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*" eavesdrop="true"/>
    <allow send_type="signal"/>
    <allow receive_type="signal"/>
    <allow eavesdrop="true"/>
  </policy>
</busconfig>
"""


def command(action: str, *words: str) -> list[str | Path]:
    """The command that runs this file as a program: ``serve``, or ``announce`` with ``shutdown`` or ``cancelled``."""
    return [sys.executable, Path(__file__).resolve(), action, *words]


def serve() -> None:
    """Starts the bus and answers on it for ever."""
    _SOCKET.parent.mkdir(exist_ok=True)
    configuration = _SOCKET.parent / "system.conf"
    configuration.write_text(_CONFIGURATION)
    subprocess.run(["dbus-daemon", f"--config-file={configuration}", "--fork"], check=True, timeout=20)
    with _connected() as bus:
        bus.send_and_get_reply(message_bus.RequestName(_NAME), timeout=10)
        print(READY, flush=True)
        locks: list[int] = []  # both ends of a pipe for each; nobody waits for one to be given back
        while True:
            message = bus.receive()
            if message.header.message_type is MessageType.method_call:
                bus.send(_answer(message, locks))


def _answer(call: Message, locks: list[int]) -> Message:
    asked = call.header.fields.get(HeaderFields.member)
    if asked == "Inhibit":
        locks += os.pipe()
        return new_method_return(call, "h", (locks[-1],))
    if asked == "Get" and call.body[1] == "InhibitDelayMaxUSec":
        return new_method_return(call, "v", (("t", _DELAY_MAX_US),))
    return new_error(call, "org.freedesktop.DBus.Error.UnknownMethod", "s", (f"{asked} is not served here",))


def announce(what: str) -> None:
    """Tells the kubelet that the machine goes down (``shutdown``), or that this was called off (``cancelled``)."""
    with _connected() as bus:
        bus.send(new_signal(_MANAGER, "PrepareForShutdown", "b", (what == "shutdown",)))


def _connected() -> DBusConnection:
    return open_dbus_connection(f"unix:path={_SOCKET}", enable_fds=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["announce", ("shutdown" | "cancelled") as what]:
            announce(what)
        case _:
            sys.exit("expected: serve, or announce shutdown, or announce cancelled")
