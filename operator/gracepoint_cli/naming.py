"""How a user names a workload: KIND/NAME as kubectl writes it, or NAME alone. Pure.

The kinds are those that the operator knows, and those whose controllers make such workloads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gracepoint_cli.errors import CommandError, ExitCode
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.workloads import MAKERS, TYPES, Workload, WorkloadMaker, WorkloadType

Json = dict[str, Any]

_KINDS: tuple[WorkloadType | WorkloadMaker, ...] = (*TYPES, *MAKERS)


@dataclasses.dataclass(frozen=True)
class Named:
    """A workload as a user names it.

    Attributes:
        kind: Its kind, or the kind of what makes it, as in the API. None: any.
    """

    kind: str | None
    name: str

    @property
    def of_workload(self) -> str | None:
        """The kind of the workload itself. None: any."""
        made = {maker.name: maker.makes.name for maker in MAKERS}
        return self.kind if self.kind is None else made.get(self.kind, self.kind)


@dataclasses.dataclass(frozen=True)
class WorkloadMatch:
    """A workload of the cluster.

    Attributes:
        type: What the operator knows of its kind.
        body: The object, with its kind.
        maker: The kind of the object that made it, for example TrainJob. Empty if its user created it.
    """

    type: WorkloadType
    body: Json
    maker: str = ""

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def title(self) -> str:
        """How messages call it, for example ``JobSet llm``."""
        return f"{self.type.name} {self.name}" + (f" of the {self.maker} {self.name}" if self.maker else "")

    def read(self) -> Workload:
        """Returns what the operator reads of it.

        Raises:
            CommandError: A part of it is not of the schema.
        """
        try:
            return self.type.read(self.body)
        except Unreadable as error:
            raise CommandError(f"the {self.title} cannot be read: {error}") from error


def parse(text: str) -> Named:
    """Reads KIND/NAME or NAME. The kind may be singular, plural or with its group, in any case, as for kubectl.

    Raises:
        CommandError: The kind is not known, or there is no name.
    """
    written, slash, name = text.rpartition("/")
    if not slash:
        return Named(None, text)
    word, _, group = written.lower().partition(".")
    for known in _KINDS:
        if word in (known.name.lower(), known.kind.plural) and group in ("", known.kind.group) and name:
            return Named(known.name, name)
    kinds = ", ".join(f"{known.name.lower()}/NAME" for known in _KINDS)
    raise CommandError(f"found {text!r}, expected NAME or one of {kinds}", code=ExitCode.USAGE)


def made_by(body: Mapping[str, Any]) -> str:
    """Returns the kind of the object that made a workload. Empty if its user created it."""
    reference = owner(body)
    return next((maker.name for maker in MAKERS if maker.name == reference.get("kind")), "")


def called(kind: str, name: str, maker: str = "") -> str:
    """Returns how a user names a workload on the command line."""
    return f"{(maker or kind).lower()}/{name}"


def owner(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the reference to the object that controls this one. Empty if there is none."""
    references = body["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})
