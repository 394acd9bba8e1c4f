"""``python -m gracepoint_operator``: one replica of the operator.

The main thread waits for SIGTERM or SIGINT. A second thread runs the controller and the servers (``server``), a third
one runs the channel (``channel.service``), and some more watch the cluster (``watches``). The
process ends when it receives such a signal. It also ends when the second or third thread fails, with a status other
than 0. No answer or failure of the API server ends it. It writes no files.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import platform
import signal
import sys
import threading
import time
import urllib.parse
from pathlib import Path

from gracepoint_operator import event_loop
from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.decisions.decide import DEFAULT_LIKELY_GANGS_PER_MINUTE
from gracepoint_operator.decisions.policy_conditions import PodRights
from gracepoint_operator.kube.client import KubeClient, KubeError
from gracepoint_operator.limited_port import ConnectionLimits
from gracepoint_operator.logs import about, configure
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.garbage_collector import Limits
from gracepoint_operator.recording.snapshot_holdings import SnapshotSettings
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.server import Server, ServerSettings
from gracepoint_operator.signals import BUILT_IN, UserRowsError, read_user_rows
from gracepoint_operator.trust.bundle import OVERLAP_S
from gracepoint_operator.trust.certificates import Certificates, TrustPlaces
from gracepoint_operator.watches import Watches
from gracepoint_operator.webhooks.admission import DEFAULT_REQUESTS_PER_NAMESPACE

logger = logging.getLogger("gracepoint_operator")

_SHORTEST_TOKEN = 16
_ENDING = (signal.SIGTERM, signal.SIGINT)
#: A thread that wants to run Python waits for another one at most this long. With the default of 5 ms, a decision that
#: needs the API server or another loop can wait for each of the others in turn.
_THREADS_TAKE_TURNS_S = 0.001
#: How often the main thread looks whether another thread has failed.
_LOOK_S = 0.5
#: How long the watches may take to end. The last writes of the servers come after that, within the pod's grace period.
_WATCHES_END_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Runs one replica; returns the exit status."""
    options = _parser().parse_args(arguments)
    configure(options.log_format, options.log_level)
    event_loop.restrain()
    sys.setswitchinterval(_THREADS_TAKE_TURNS_S)
    metrics = Metrics(accounts=options.account_metrics == "true")
    try:
        own_rows = () if options.signals is None else read_user_rows(options.signals)
        api = KubeClient.connect(options.kubeconfig, options.context, metrics.count_api_request)
        certificates = Certificates(
            _tls_directory(options.tls_directory),
            required=not options.own_certificate,
            overlap_s=options.trust_overlap_seconds,
            webhooks_follow=not options.mutating_webhooks,
        )
        webhook_token = _read_token(options.webhook_token)
    except (KubeError, OSError, UserRowsError, ValueError) as error:
        logger.error("cannot start", extra=about(error=str(error)))
        return 1
    snapshots = _snapshots(options)
    settings = ControllerSettings(
        replica=options.replica,
        namespace=options.namespace or "default",
        namespaces=[name for name in options.watch_namespaces.split(",") if name],
        replicas=options.replicas,
        rows=(*own_rows, *BUILT_IN),
        likely_gangs_per_minute=options.likely_gangs_per_minute,
        kept=Limits(options.preemption_ttl_seconds, options.preemption_history_limit, options.request_ttl_seconds),
        first_seen_place=(options.namespace, options.sightings) if options.sightings else None,
        rights=PodRights(protects=options.protect_pods == "true", deletes=options.delete_pods == "true"),
        longest_hold_s=options.longest_eviction_hold_seconds,
        watches_devices=options.device_taints == "true",
        snapshots=snapshots,
    )
    core = Controller(api, metrics, time.time, settings, on_ready=event_loop.spare_what_is_known)
    server_settings = ServerSettings(
        webhook_token=webhook_token,
        service_url=options.service_url,
        https_port=options.https_port,
        webhook_port=options.webhook_port,
        health_port=options.health_port,
        metrics_port=options.metrics_port,
        limits=ConnectionLimits(
            at_once=options.pending_connections, at_once_of_address=options.pending_connections_per_address
        ),
        trust=TrustPlaces(
            namespace=options.namespace,
            secret=options.own_certificate,
            config_map=options.trust,
            mutating=options.mutating_webhooks,
            validating=options.validating_webhooks,
            host=urllib.parse.urlsplit(options.service_url).hostname or "localhost",
            snapshots="" if snapshots is None else snapshots.installation,
            snapshots_host="" if snapshots is None else snapshots.server_name(settings.namespace),
            snapshots_certificate=snapshots is not None and snapshots.certificate,
        ),
        requests_per_namespace=options.requests_per_namespace,
        canary=True,
    )
    server = Server(core, certificates, server_settings)
    watching = Watches(core, api, metrics, replica=options.replica)
    failed = threading.Event()
    # Before any thread starts, because threads inherit the mask: only the main thread takes the signals (sigtimedwait).
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        server.start(failed.set)
        watching.start()
        logger.info(
            "started", extra=about(replica=options.replica, namespace=options.namespace, own_rows=len(own_rows))
        )
        wait_for_end(failed)
    except RuntimeError as error:
        logger.error("ended by a failure", extra=about(error=str(error)))
        failed.set()
    finally:
        with contextlib.ExitStack() as cleanup:  # each of them in reverse order, even if another one fails
            cleanup.callback(api.close)
            cleanup.callback(server.stop)
            cleanup.callback(watching.close, _WATCHES_END_S)
            cleanup.callback(server.send_on)  # first: pods and API servers go to the other replica
    logger.info("ended", extra=about(failed=failed.is_set()))
    return 1 if failed.is_set() else 0


def wait_for_end(failed: threading.Event) -> int | None:
    """Waits for a failure, or for a signal to end, which is blocked. Returns the signal."""
    while not failed.is_set():
        received = signal.sigtimedwait(_ENDING, _LOOK_S)
        # In a process that was stopped and goes on, as by a debugger, it may return what is no signal.
        if received is not None and received.si_signo in _ENDING:
            return received.si_signo
    return None


def _snapshots(options: argparse.Namespace) -> SnapshotSettings | None:
    if not options.snapshot_servers:
        return None
    return SnapshotSettings(
        options.snapshot_servers,
        options.snapshot_port,
        tuple(label for label in options.snapshot_spread.split(",") if label),
        certificate=options.snapshot_certificate == "true",
    )


def _tls_directory(directory: Path) -> Path:
    """The directory of the certificate. If only the earlier release's directory ``former`` has one: that directory."""
    former = directory / "former"
    return directory if (directory / "tls.crt").exists() or not (former / "tls.crt").exists() else former


def _read_token(path: Path) -> str:
    token = path.read_text().strip()
    if len(token) < _SHORTEST_TOKEN:
        raise ValueError(f"{path}: found {len(token)} characters, expected a secret of {_SHORTEST_TOKEN} or more")
    return token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gracepoint-operator", description=__doc__)
    parser.add_argument("--tls-directory", type=Path, default=Path("/tls"), help="holds tls.crt, tls.key and ca.crt")
    parser.add_argument(
        "--own-certificate",
        default="",
        help="a Secret in the operator's namespace: the operator makes and renews its certificate there",
    )
    parser.add_argument(
        "--trust", default="", help="a ConfigMap in the operator's namespace: the trusted authorities are kept there"
    )
    parser.add_argument(
        "--trust-overlap-seconds",
        type=float,
        default=OVERLAP_S,
        help="how long a new authority is made known before a certificate of it is served",
    )
    parser.add_argument(
        "--mutating-webhooks",
        default="",
        help="the MutatingWebhookConfiguration whose caBundle is kept up to date; without it, others do that",
    )
    parser.add_argument("--validating-webhooks", default="", help="the same for the ValidatingWebhookConfiguration")
    parser.add_argument(
        "--webhook-token",
        type=Path,
        default=Path("/webhooks/token"),
        help="a file with the secret from which the paths of the webhooks are computed",
    )
    parser.add_argument("--service-url", required=True, help="https://<service>.<namespace>.svc:<port>")
    parser.add_argument("--https-port", type=int, default=8443, help="the channel, for pods")
    parser.add_argument("--webhook-port", type=int, default=9443, help="the webhooks, for the API server")
    parser.add_argument(
        "--pending-connections",
        type=int,
        default=ConnectionLimits.at_once,
        help="how many connections to the channel are held before their callers have shown who they are",
    )
    parser.add_argument(
        "--pending-connections-per-address",
        type=int,
        default=ConnectionLimits.at_once_of_address,
        help="how many of these may come from one address",
    )
    parser.add_argument(
        "--health-port", type=int, default=8080, help="/healthz, /readyz, and /metrics unless it has its own port"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="/metrics with HTTPS, for tokens whose users may get it; without it, /metrics is on the health port",
    )
    parser.add_argument("--replica", default=platform.node(), help="this replica's name: its pod's")
    parser.add_argument("--signals", type=Path, help="a JSON file with rows of your own for the disruption catalogue")
    parser.add_argument(
        "--likely-gangs-per-minute",
        type=int,
        default=DEFAULT_LIKELY_GANGS_PER_MINUTE,
        help="how many gangs at most get a notice for signals that are likely, but not sure",
    )
    parser.add_argument("--replicas", type=int, default=1, help="how many replicas there are, which share that limit")
    parser.add_argument(
        "--preemption-ttl-seconds",
        type=float,
        default=Limits.ttl_s,
        help="how long Preemptions that have ended are kept",
    )
    parser.add_argument(
        "--preemption-history-limit",
        type=int,
        default=Limits.history,
        help="how many Preemptions that have ended are kept for one name of a workload",
    )
    parser.add_argument(
        "--requests-per-namespace",
        type=int,
        default=DEFAULT_REQUESTS_PER_NAMESPACE,
        help="how many PreemptionRequests, open or over, one namespace may have",
    )
    parser.add_argument(
        "--request-ttl-seconds",
        type=float,
        default=Limits.request_ttl_s,
        help="how long PreemptionRequests that have ended are kept",
    )
    parser.add_argument(
        "--longest-eviction-hold-seconds",
        type=float,
        default=DEFAULT_LONGEST_HOLD_S,
        help="how long evictions are held at most, whatever a policy says",
    )
    parser.add_argument(
        "--protect-pods",
        choices=("true", "false"),
        default="false",
        help="whether the operator has the right to annotate pods, which protects them from autoscalers",
    )
    parser.add_argument(
        "--delete-pods",
        choices=("true", "false"),
        default="false",
        help="whether the operator has the right to delete pods, which ends sidecars that outlive the training",
    )
    parser.add_argument(
        "--device-taints",
        choices=("true", "false"),
        default="false",
        help="whether the taints of devices (resource.k8s.io) are watched; the operator needs the right to do so",
    )
    parser.add_argument(
        "--snapshot-servers",
        default="",
        help="the name of the snapshot servers' DaemonSet and Secret, and the value of their pods' label; without it, "
        "there are none",
    )
    parser.add_argument(
        "--snapshot-certificate",
        choices=("true", "false"),
        default="true",
        help="whether the operator makes the snapshot servers' certificate; it needs --own-certificate for that",
    )
    parser.add_argument("--snapshot-port", type=int, default=9470, help="the port of the snapshot servers")
    parser.add_argument(
        "--snapshot-spread",
        default="",
        help="labels of nodes with commas between them, the widest first: both copies of a snapshot are in different "
        "failure domains",
    )
    parser.add_argument(
        "--watch-namespaces",
        default="",
        help="names with commas between them: only what is in these namespaces is watched; without it, all",
    )
    parser.add_argument(
        "--account-metrics",
        choices=("true", "false"),
        default="true",
        help="whether the metrics have series for each workload: where its time went",
    )
    parser.add_argument("--namespace", default="", help="the operator's own namespace")
    parser.add_argument(
        "--sightings",
        default="",
        help="a ConfigMap in the operator's namespace: the times at which signs were first seen are kept there",
    )
    parser.add_argument("--log-format", choices=("plain", "json"), default="plain")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--kubeconfig", help="a kubeconfig file; without it, the pod's service account")
    parser.add_argument("--context", help="a context of the kubeconfig")
    return parser


if __name__ == "__main__":
    sys.exit(main())
