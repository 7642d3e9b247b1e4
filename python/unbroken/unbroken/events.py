"""What happened to the queue pairs and NICs of a runtime folder, as programs can wait for it.

    from unbroken import events
    watch = events.Watch(event="switch", kind="passive")
    for step in range(steps):
        train(step)
        if watch.poll():
            save_checkpoint(step)

A *switch* is there when the first message has come through on the other NIC. It is of kind
`passive` if a failure forced it, and `planned` if not. A program that saves its state then loses
nothing if the other NIC fails, too (SHIFT §4.4). Ranks that save together have to agree first: each
of them sees the switches of its own queue pairs.

All events and their fields are in docs/reference/cli.md. The log is `events.jsonl` in the runtime
folder.
"""

import errno
import json
import os
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Watch", "runtime_folder"]

_LOG = "events.jsonl"
# How often a log that has nothing new is looked at.
_LOOK_S = 0.01
# The longest line that is taken for an event, and how much is read at a time.
_LINE_BYTES = 1 << 20


def runtime_folder() -> Path:
    """`$UNBROKEN_RUNTIME`, else where the library has it: `$XDG_RUNTIME_DIR/unbroken`, else
    `/dev/shm/unbroken-<uid>`, else (where that is no memory) `/tmp/unbroken-<uid>`."""
    if named := os.environ.get("UNBROKEN_RUNTIME"):
        return Path(named)
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(folder, "unbroken")
    root = "/dev/shm" if os.path.ismount("/dev/shm") else "/tmp"
    return Path(root, f"unbroken-{os.geteuid()}")


class Watch:
    """The events from now on whose fields have these values: `Watch(event="switch", qp=0x102)`.

    `runtime` is the runtime folder [default: this process's], which need not be there yet. `pid` is
    the process that they are of [default: this one]; None is for all. Of one thread."""

    def __init__(
        self, *, runtime: str | Path | None = None, pid: int | None = -1, **fields: Any
    ) -> None:
        self._path = Path(runtime or runtime_folder()) / _LOG
        self._fields = dict(fields)
        if pid is not None:
            self._fields["pid"] = os.getpid() if pid == -1 else pid
        self._partial = b""
        self._file: BinaryIO | None = self._open()
        if self._file:
            self._file.seek(0, os.SEEK_END)

    def poll(self) -> list[dict[str, Any]]:
        """The events that came since the last call, in the order of the log. Does not wait."""
        events = self._read()
        # The log may have been rotated: what follows is in the file that has its name now.
        if self._advance():
            events += self._read()
        return [e for e in events if all(e.get(k) == v for k, v in self._fields.items())]

    def wait(self, timeout_s: float) -> list[dict[str, Any]]:
        """The same, as soon as there are some; an empty list if none comes in that time."""
        deadline = time.monotonic() + timeout_s
        while not (events := self.poll()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(_LOOK_S, left_s))
        return events

    def close(self) -> None:
        """Ends it: no event comes any more."""
        if self._file:
            self._file.close()
            self._file = None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _open(self) -> BinaryIO | None:
        """The log; None where there is none yet. It must be this user's own file."""
        try:
            log = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        file = os.fdopen(log, "rb", buffering=0)
        status = os.fstat(log)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            file.close()
            what = "the event log is not a file of this user"
            raise PermissionError(errno.EPERM, what, str(self._path))
        return file

    def _advance(self) -> bool:
        """Goes on to the file that has the name now, if it is another one."""
        following = self._open()
        if following is None:
            return False
        if self._file and os.path.sameopenfile(self._file.fileno(), following.fileno()):
            following.close()
            return False
        self.close()
        self._file, self._partial = following, b""
        return True

    def _read(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        while self._file and (more := self._file.read(_LINE_BYTES)):
            *lines, self._partial = (self._partial + more).split(b"\n")
            events += [event for line in lines if (event := _parse(line))]
            if len(self._partial) > _LINE_BYTES:
                self._partial = b""  # No event is as long as that.
        return events


def _parse(line: bytes) -> dict[str, Any] | None:
    """An event; None for half a line, which a writer without space has left."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
