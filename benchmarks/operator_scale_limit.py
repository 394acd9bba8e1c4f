"""What this machine needs to list the same objects: the limit for the start of the operator.

    python -m benchmarks.operator_scale_limit KUBECONFIG

Reads every page of every watched kind with the label selectors that the operator uses, decodes it, and drops it.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import kubernetes.client
import kubernetes.config

from gracepoint_operator.cache.relister import ALWAYS, OPTIONAL, SELECTORS

_PAGE = 500
_TIMEOUT_S = 120.0


def main() -> None:
    kubernetes.config.load_kube_config(sys.argv[1], persist_config=False)
    client = kubernetes.client.ApiClient()
    began_at, cpu_s, requests, objects, received = time.monotonic(), time.process_time(), 0, 0, 0
    for kind in ALWAYS - OPTIONAL:
        query = {"limit": str(_PAGE), "labelSelector": SELECTORS[kind] or ""}
        while True:
            answer = client.call_api(
                kind.path(),
                "GET",
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
            page = json.loads(answer.data)
            requests, objects, received = requests + 1, objects + len(page["items"]), received + len(answer.data)
            query["continue"] = page["metadata"].get("continue") or ""
            if not query["continue"]:
                break
    told = {"wall_s": time.monotonic() - began_at, "cpu_s": time.process_time() - cpu_s}
    print(json.dumps({**told, "requests": requests, "objects": objects, "bytes": received}))


if __name__ == "__main__":
    main()
