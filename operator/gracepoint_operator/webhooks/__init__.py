"""The webhooks: they change a labelled JobSet and its pods when they are created, and delay evictions.

``release_contract``, ``injection`` and ``updates`` have pure functions on plain dicts. ``routes`` reads an
AdmissionReview, calls them and answers with a JSON patch. No webhook writes to the API, so dry runs and repeated calls
are harmless. ``admission`` is what the routes ask of the operator, such as whether an eviction waits.

The server serves the routes, the controller makes the ``EvictionHold``, and the command line calls the pure functions.
They call ``cache``, ``model`` and ``resources``.
"""

from gracepoint_operator.webhooks.admission import Admission
from gracepoint_operator.webhooks.injection import AdmissionSettings, avoid_nodes, inject_workload, refresh_pod
from gracepoint_operator.webhooks.installation import InstalledApi, read_installed_api
from gracepoint_operator.webhooks.release_contract import ContractViolation, Patched, release_contract
from gracepoint_operator.webhooks.routes import add_routes

__all__ = [
    "Admission",
    "AdmissionSettings",
    "ContractViolation",
    "InstalledApi",
    "Patched",
    "add_routes",
    "avoid_nodes",
    "inject_workload",
    "read_installed_api",
    "refresh_pod",
    "release_contract",
]
