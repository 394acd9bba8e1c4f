"""What a disk may hold after a crash, worked out from the recorded calls of processes.

The model is POSIX' weakest: what a call did to a file or a folder is certain to be on the disk only once an fsync of
that very file or folder, begun after the call had ended, has ended. Until then each change may be there or not, by
itself, in any order; a write may be there by half, or its length without its data. The entry of a file is a change of
its folder, not of the file. A rename within a folder is one change. (File systems in use promise more: so whatever
survives here survives there.)

``Disk.crashes`` gives the trees of a crash at every point of the recording: all that had happened is there; only what
is certain; what is certain and one change more, whole or torn; everything but one change, or with it torn; all
changes of folders without the data of files.
"""

from __future__ import annotations

import dataclasses
import functools
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.multiprocess.strace import Call

Tree = Mapping[str, bytes | None]
"""Contents of files by path below the top; None for a folder."""

_TOP = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What one call did to one file or folder; which fields are set says what. Two are never equal.

    Attributes:
        inode: Of the file or folder.
        entered: When the call began.
        left: When it had ended.
        removed: A name that the folder has no more.
        added: A name that the folder has now.
        child: Its inode, and whether that is a folder.
        offset: Where ``data`` went in a file.
        data: That was written.
        length: That the file was cut or extended to.
    """

    inode: int
    entered: int
    left: int
    removed: str | None = None
    added: str | None = None
    child: tuple[int, bool] = (0, False)
    offset: int = 0
    data: bytes | None = None
    length: int | None = None

    @functools.cached_property
    def torn(self) -> Change | None:
        """Half of a write; None if it cannot be halved."""
        return dataclasses.replace(self, data=self.data[: len(self.data) // 2]) if self.data else None

    @functools.cached_property
    def without_data(self) -> Change | None:
        """A write of which only the length came to be; None for what is no write."""
        return dataclasses.replace(self, data=bytes(len(self.data))) if self.data else None


@dataclasses.dataclass
class Crash:
    """What a disk may hold after a crash anywhere from ``first`` to ``last``, positions in the recording."""

    tree: Tree
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class _Sync:
    inode: int
    entered: int
    left: int


class Disk:
    """The files below one folder, as the recorded ``calls`` made them.

    Args:
        calls: In the order in which they were entered.
        top: The folder; it exists and is empty when the recording begins.

    Raises:
        NotImplementedError: A call did something that the model does not have.
    """

    def __init__(self, calls: Sequence[Call], top: str) -> None:
        self._top = top
        self._folders: dict[int, dict[str, int]] = {_TOP: {}}
        self._sizes: dict[int, int] = {}  # of files
        self._changes: list[Change] = []
        self._syncs: list[_Sync] = []
        early: list[Call] = []
        for call in calls:
            if call.mark is None:
                early.append(call)
                # One that makes something where there was no folder yet when it was entered: another thread made that.
                while ready := next((call for call in early if not self._is_early(call)), None):
                    early.remove(ready)
                    self._note(ready)
        if early:
            raise NotImplementedError(f"the model of the disk has no folder for {early}")

    def tree(self) -> Tree:
        """What is there at the end, if nothing crashes."""
        return _Trees(self._changes).tree(-1)

    def crashes(self, *, ignoring: Callable[[str], bool]) -> list[Crash]:
        """Returns every tree that a crash may leave, once; without the paths below the top that are to be ignored."""
        ways = [way for change in self._changes for way in (change, change.torn, change.without_data) if way]
        trees = _Trees(ways)
        positions: dict[int, tuple[int, int]] = {}
        moments = {at for change in self._changes for at in (change.entered, change.left)}
        for position in sorted(moments | {sync.left for sync in self._syncs}):
            for chosen in self._variants(position, trees.bit):
                positions[chosen] = positions.get(chosen, (position,))[0], position
        found: dict[frozenset[tuple[str, bytes | None]], Crash] = {}
        for chosen, (first, last) in positions.items():
            tree = {path: contents for path, contents in trees.tree(chosen).items() if not ignoring(path)}
            crash = found.setdefault(frozenset(tree.items()), Crash(tree, first, last))
            crash.first, crash.last = min(first, crash.first), max(last, crash.last)
        return list(found.values())

    def _variants(self, position: int, bit: Mapping[Change, int]) -> Iterator[int]:
        synced_until = {s.inode: s.entered for s in self._syncs if s.left <= position}
        everything = certain = lengths = 0
        loose = []
        for change in self._changes:
            if change.entered > position:
                break
            everything |= bit[change]
            if change.left < synced_until.get(change.inode, 0):
                certain |= bit[change]
            else:
                loose.append(change)
                lengths |= bit[change.without_data or change]
        yield from (everything, certain, certain | lengths)
        for change in loose:
            yield certain | bit[change]
            yield everything & ~bit[change]
            if change.torn:
                yield certain | bit[change.torn]
                yield everything & ~bit[change] | bit[change.torn]

    # The recording, call by call.

    def _note(self, call: Call) -> None:
        strings, paths = call.strings, call.paths
        match call.name:
            case "open" | "openat" | "creat":
                self._open(call, self._named(call, 0))
            case "mkdir" | "mkdirat":
                self._make(call, self._named(call, 0), folder=True)
            case "unlink" | "unlinkat" | "rmdir":
                self._remove(call, self._named(call, 0))
            case "rename" | "renameat" | "renameat2":
                self._rename(call, self._named(call, 0), self._named(call, 1))
            case "write" | "writev" if (inode := self._inode(paths[0])) is not None:
                self._write(call, inode, self._sizes[inode], b"".join(strings)[: call.result])
            case "pwrite64" | "pwritev" if (inode := self._inode(paths[0])) is not None:
                self._write(call, inode, call.numbers[-1], b"".join(strings)[: call.result])
            case "ftruncate" if (inode := self._inode(paths[0])) is not None:
                self._resize(call, inode, call.numbers[-1])
            case "fsync" | "fdatasync" if (inode := self._inode(paths[0])) is not None:
                self._syncs.append(_Sync(inode, call.entered, call.left))
            case _ if any(self._below(path) is not None for path in (*paths, *self._named_all(call))):
                raise NotImplementedError(f"the model of the disk has no {call.name}({call.arguments})")

    def _is_early(self, call: Call) -> bool:
        if call.name not in ("mkdir", "mkdirat", "creat") and "O_CREAT" not in call.arguments:
            return False
        path = self._named(call, 0)
        return bool(self._below(path)) and self._place(path)[0] is None

    def _open(self, call: Call, path: str) -> None:
        if "O_CREAT" in call.arguments or call.name == "creat":
            self._make(call, path, folder=False)
        if "O_TRUNC" in call.arguments and (inode := self._inode(path)) is not None and self._sizes[inode]:
            self._resize(call, inode, 0)

    def _make(self, call: Call, path: str, *, folder: bool) -> None:
        parent, name = self._place(path)
        if parent is None or name in self._folders[parent]:
            return
        inode = len(self._folders) + len(self._sizes)
        if folder:
            self._folders[inode] = {}
        else:
            self._sizes[inode] = 0
        self._folders[parent][name] = inode
        self._changes.append(Change(parent, call.entered, call.left, added=name, child=(inode, folder)))

    def _remove(self, call: Call, path: str) -> None:
        parent, name = self._place(path)
        if parent is not None and self._folders[parent].pop(name, None) is not None:
            self._changes.append(Change(parent, call.entered, call.left, removed=name))

    def _rename(self, call: Call, source: str, target: str) -> None:
        (parent, old), (to, new) = self._place(source), self._place(target)
        if parent is None and to is None:
            return
        if parent is None or parent != to:
            raise NotImplementedError(f"the model of the disk has no rename to another folder: {source} to {target}")
        inode = self._folders[parent].pop(old)
        self._folders[parent][new] = inode
        self._changes.append(
            Change(parent, call.entered, call.left, removed=old, added=new, child=(inode, inode in self._folders))
        )

    def _write(self, call: Call, inode: int, offset: int, data: bytes) -> None:
        self._sizes[inode] = max(self._sizes[inode], offset + len(data))
        self._changes.append(Change(inode, call.entered, call.left, offset=offset, data=data))

    def _resize(self, call: Call, inode: int, length: int) -> None:
        self._sizes[inode] = length
        self._changes.append(Change(inode, call.entered, call.left, length=length))

    def _named_all(self, call: Call) -> list[str]:
        return [self._named(call, n) for n in range(len(call.strings))] if "write" not in call.name else []

    def _named(self, call: Call, which: int) -> str:
        """The path of the call's argument that is a path, however it was given."""
        folders = call.paths if call.name.endswith(("at", "at2")) else []
        path = call.strings[which].decode(errors="surrogateescape")
        return posixpath.normpath(posixpath.join(folders[which] if which < len(folders) else "/", path))

    def _below(self, path: str) -> str | None:
        """``path`` below the top; None if it lies elsewhere."""
        path = posixpath.normpath(path)
        if path == self._top:
            return ""
        return path.removeprefix(f"{self._top}/") if path.startswith(f"{self._top}/") else None

    def _inode(self, path: str) -> int | None:
        below = self._below(path)
        if below is None:
            return None
        inode: int | None = _TOP
        for name in filter(None, below.split("/")):
            inode = None if inode is None else self._folders.get(inode, {}).get(name)
        return inode

    def _place(self, path: str) -> tuple[int | None, str]:
        folder, name = posixpath.split(path)
        return self._inode(folder), name


class _Trees:
    """Trees of any of ``changes``, in time's order, by a set of bits, one for each."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.bit = {change: 1 << n for n, change in enumerate(changes)}
        self._of: dict[int, list[Change]] = {}
        for change in changes:
            self._of.setdefault(change.inode, []).append(change)
        self._mask = {inode: sum(self.bit[change] for change in of) for inode, of in self._of.items()}
        self._entries = functools.cache(lambda inode, bits: _entries(self._chosen(inode, bits)))
        self._contents = functools.cache(lambda inode, bits: _contents(self._chosen(inode, bits)))

    def tree(self, bits: int) -> Tree:
        found: dict[str, bytes | None] = {}

        def walk(folder: int, path: str) -> None:
            for name, (child, is_folder) in self._entries(folder, bits & self._mask.get(folder, 0)).items():
                where = f"{path}/{name}" if path else name
                found[where] = None if is_folder else self._contents(child, bits & self._mask.get(child, 0))
                if is_folder:
                    walk(child, where)

        walk(_TOP, "")
        return found

    def _chosen(self, inode: int, bits: int) -> list[Change]:
        return [change for change in self._of.get(inode, ()) if self.bit[change] & bits]


def _entries(changes: Sequence[Change]) -> dict[str, tuple[int, bool]]:
    """A folder's entries after ``changes``, in which others may be missing."""
    entries: dict[str, tuple[int, bool]] = {}
    for change in changes:
        if change.removed is not None:
            entries.pop(change.removed, None)
        if change.added is not None:
            entries[change.added] = change.child
    return entries


def _contents(changes: Sequence[Change]) -> bytes:
    data = bytearray()
    for change in changes:
        if change.length is not None:
            data = data[: change.length].ljust(change.length, b"\0")
        if change.data is not None:
            data = data.ljust(change.offset, b"\0")
            data[change.offset : change.offset + len(change.data)] = change.data
    return bytes(data)
