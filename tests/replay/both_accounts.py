"""Holds the operator's account of a run against the replay's own, after each fault and in the end."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from pathlib import Path

from demo import records
from demo.snapshot import Json
from demo.training import TrainingRun
from tests.replay import account
from tests.replay.pod_watch import PodWatch
from tests.testcluster.shell import wait_until

_ACCOUNT_S = 180.0
#: The newest of the operator's lives are not settled yet, and show their times.
_LIVES = 3

Rows = list[tuple[str, float, float]]


class BothAccounts:
    """See the module. Has no state but a file of notes, ``accounts.jsonl``.

    Args:
        run: The run.
        policy: Name of its policy, which has the operator's account.
        pods: The watch of its pods.
        folder: Where the notes go.
    """

    def __init__(self, run: TrainingRun, policy: str, pods: PodWatch, folder: Path) -> None:
        self._run = run
        self._policy = policy
        self._pods = pods
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "accounts.jsonl"
        self._file.unlink(missing_ok=True)

    def lives(self, end_s: float | None = None) -> list[account.Life]:
        """Returns the starts of the gang by the replay's own records, until now or until ``end_s``."""
        words, steps = account.read_words(self._run.output), records.read(self._run.output)
        return account.lives(self._pods.pods(), words, steps, end_s=time.time() if end_s is None else end_s)

    def note(self, what: str) -> None:
        """Writes both accounts down as they are now: what explains a difference in the end."""
        if (entry := self._entry()) is not None:
            self._write(what, entry, _at(entry["until"]))

    def finished(self) -> Rows:
        """Returns both accounts of the finished run: each category with its seconds here and in the operator's account.

        Raises:
            ClusterError: The operator's account is not finished in time.
        """

        def over() -> bool:
            entry = self._entry()
            return entry is not None and "finished" in entry

        wait_until(f"the operator's account of {self._run.name}", over, timeout_s=_ACCOUNT_S, every_s=1)
        entry = self._entry()
        assert entry is not None
        return self._write("the end", entry, _at(entry["finished"]))

    def _entry(self) -> Json | None:
        """The run's entry in the policy's status. None if there is none yet."""
        query = ("get", f"checkpointpolicies/{self._policy}", f"--namespace={self._run.namespace}", "--output=json")
        entries = json.loads(self._run.cluster.kubectl(*query).stdout).get("status", {}).get("goodput", [])
        return next((entry for entry in entries if entry["name"] == self._run.name), None)

    def _write(self, what: str, entry: Json, end_s: float) -> Rows:
        lives = self.lives(end_s)
        rows = account.compared(account.spent(lives, since_s=_at(entry["since"]), end_s=end_s), entry["seconds"])
        own = [{**dataclasses.asdict(life), "steps": len(life.steps)} for life in lives[-_LIVES:]]
        line = {"what": what, "end_s": end_s, "seconds": rows, "operator": entry, "own": own}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return rows


def _at(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp).timestamp()
