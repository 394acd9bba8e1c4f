"""The coordination service of ``benchmarks.gang_scale``, in a process of its own, so that its CPU time can be told.

Argument: how many processes join. Prints its address, and serves until its input ends.
"""

from __future__ import annotations

import os
import sys

from tests.ports import hold_coordinator_port


def main() -> None:
    """Serves."""
    from jaxlib import _jax

    with hold_coordinator_port() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        service = _jax.get_distributed_runtime_service(address, int(sys.argv[1]))
        print(address, flush=True)
        sys.stdin.read()
        del service
        os._exit(0)


if __name__ == "__main__":
    main()
