"""The webhooks: what a labelled JobSet and its pods are given when they are created, and evictions that wait.

Pure functions on plain dicts (``contract``, ``injection``, ``placement``), and thin routes (``routes``) that
read an AdmissionReview, call them and answer, the mutating ones with a JSON patch. Nothing here keeps state or
writes to the API, so dry runs and repeated calls are harmless. Whether an eviction waits is the operator's to say.
"""

from gracepoint_operator.webhooks.injection import AdmissionSettings, inject_jobset, refresh_pod
from gracepoint_operator.webhooks.placement import avoid_nodes
from gracepoint_operator.webhooks.release_contract import ContractViolation, Patched, release_contract
from gracepoint_operator.webhooks.routes import AdmissionContext, add_routes
from gracepoint_operator.webhooks.served import Served, served

__all__ = [
    "AdmissionContext",
    "AdmissionSettings",
    "ContractViolation",
    "Patched",
    "Served",
    "add_routes",
    "avoid_nodes",
    "inject_jobset",
    "refresh_pod",
    "release_contract",
    "served",
]
