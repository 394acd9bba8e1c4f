"""The item ``iter``: where each process's data iterator stands. Data loaders such as Grain have such a handler."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from parts import Batches


class IteratorHandler(ocp.CheckpointHandler):
    """Writes one file for each process."""

    def save(self, directory: Any, args: Any) -> None:
        """Writes the position of ``args.item``."""
        self._file(directory).write_text(json.dumps({"position": args.item.position}))

    def restore(self, directory: Any, args: Any) -> Any:
        """Moves ``args.item`` to the position that was saved, and returns it."""
        args.item.position = json.loads(self._file(directory).read_text())["position"]
        return args.item

    def _file(self, directory: Any) -> Any:
        return directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"


@ocp.args.register_with_handler(IteratorHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
    """Arguments of a save."""

    item: Batches


@ocp.args.register_with_handler(IteratorHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
    """Arguments of a restore."""

    item: Batches
