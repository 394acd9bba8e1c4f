"""JAX's distributed state. Read from JAX at each access, so it does not matter which code joined the cluster."""

from __future__ import annotations

from typing import Any

from gracepoint.errors import ClusterError


class State:
    """The state of the JAX cluster. Before ``initialize`` it is that of a single process."""

    @property
    def initialized(self) -> bool:
        """True while this process is joined to a cluster."""
        return self.client is not None

    @property
    def process_id(self) -> int:
        """This process's id in the coordination service. It may differ from ``jax.process_index()``."""
        found: int = jax_state().process_id
        return found

    @property
    def num_processes(self) -> int:
        found: int = jax_state().num_processes
        return found

    @property
    def coordinator_address(self) -> str | None:
        found: str | None = jax_state().coordinator_address
        return found

    @property
    def client(self) -> Any | None:
        """The coordination service's client. None if this process has not joined a cluster."""
        return jax_state().client

    @property
    def service(self) -> Any | None:
        """The coordination service. None in all processes but process 0."""
        return jax_state().service

    @property
    def preemption_sync_manager(self) -> Any | None:
        """JAX's preemption sync manager, which ``multihost_utils.reached_preemption_sync_point`` uses.

        None if JAX's preemption service is off.
        """
        return jax_state().preemption_sync_manager

    def initialize_preemption_sync_manager(self) -> None:
        """Starts JAX's preemption service in a cluster that was initialised without it. ``initialize`` does so itself.

        Raises:
            ClusterError: The service runs already; there is no cluster; or ``jax_enable_preemption_service`` is off.
        """
        if self.preemption_sync_manager is not None:
            raise ClusterError("the preemption sync manager is initialised already: once is enough, initialize() does")
        if self.client is None:
            raise ClusterError("the preemption sync manager needs a cluster: call initialize() first")
        jax_state().initialize_preemption_sync_manager()
        if self.preemption_sync_manager is None:
            raise ClusterError("jax_enable_preemption_service is False: set it before the preemption sync manager")


global_state = State()


def jax_state() -> Any:
    """Returns JAX's own distributed state, which is not public. Loads JAX."""
    from jax._src import distributed

    return distributed.global_state
