"""The proxy in a process of its own, so that it competes with the clients for processors only, not for Python's lock.

``open_proxy`` starts it and sends it commands over its standard input, one line of JSON each; it replies with one
line. It ends with its standard input, so also when its owner is killed.

Processes: one, from ``open_proxy`` to the end of the ``with`` statement. Threads: those of ``fault_proxy``, there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Count, Fault, How, Rule, Shape

_ENDED_S = 10.0


class ProxyProcess:
    """A proxy that runs elsewhere. Its methods are those of ``FaultProxy``.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url: str = self._ask()

    def set_shape(self, shape: Shape) -> None:
        """See ``FaultProxy.shape``."""
        self._ask("shape", dataclasses.asdict(shape))

    def set_rules(self, *rules: Rule) -> None:
        """See ``FaultProxy.set_rules``."""
        self._ask("rules", [_plain(rule) for rule in rules])

    def reset(self) -> None:
        """See ``FaultProxy.reset``."""
        self._ask("reset")

    def counts(self) -> dict[str, Count]:
        """See ``FaultProxy.counts``."""
        return {key: Count(**value) for key, value in self._ask("counts").items()}

    @property
    def processor_s(self) -> float:
        """Seconds of processor time that it has used."""
        return float(self._ask("processor"))

    def _ask(self, what: str = "", value: Any = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if what:
            self._process.stdin.write(json.dumps([what, value]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy's process ended with {self._process.wait(_ENDED_S)}; its error is above")
        return json.loads(line)


@contextlib.contextmanager
def open_proxy(target: str, shape: Shape | None = None) -> Iterator[ProxyProcess]:
    """Starts the proxy in front of a server. The arguments are those of ``FaultProxy``."""
    argv = [sys.executable, "-m", "tests.object_stores.proxy_process", target]
    repository = Path(__file__).resolve().parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=repository, start_new_session=True) as process:
        try:
            proxy = ProxyProcess(process)
            proxy.set_shape(shape or Shape())
            yield proxy
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_ENDED_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Serves the commands of standard input."""

    def say(value: Any) -> None:
        print(json.dumps(value), flush=True)

    with FaultProxy(sys.argv[1]) as proxy:
        say(proxy.url)
        for line in sys.stdin:
            what, value = json.loads(line)
            match what:
                case "shape":
                    proxy.shape = Shape(**value)
                    say(None)
                case "rules":
                    proxy.set_rules(*(_rule(each) for each in value))
                    say(None)
                case "reset":
                    proxy.reset()
                    say(None)
                case "counts":
                    say({key: dataclasses.asdict(count) for key, count in proxy.counts().items()})
                case "processor":
                    say(time.process_time())
                case _:
                    raise ValueError(f"an unknown command: {what}")


def _plain(rule: Rule) -> dict[str, Any]:
    plain = dataclasses.asdict(rule)
    plain["fault"]["how"] = rule.fault.how.value
    return plain


def _rule(plain: dict[str, Any]) -> Rule:
    fault = Fault(**{**plain["fault"], "how": How(plain["fault"]["how"])})
    return Rule(**{**plain, "fault": fault, "kinds": tuple(plain["kinds"])})


if __name__ == "__main__":
    main()
