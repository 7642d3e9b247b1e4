"""`unbroken/coll.h` over ctypes: communicators, operations on addresses, requests.

Nothing here keeps memory alive: whoever gives an address keeps what lies there until the request is
over. Calls release the interpreter's lock. The C library is loaded by the first call that needs it;
OSError says where it was looked for."""

import ctypes
import enum
import functools
import os
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

NAME = "libunbroken_coll.so"
VARIABLE = "UNBROKEN_COLLECTIVE_LIBRARY"
# `ubcollResult_t`
SYSTEM_ERROR, INVALID_USAGE, QUEUE_FULL = 2, 5, 100
# Instead of a rank, to receive from whichever sends first.
ANY_SOURCE = -1
# A number of milliseconds that stands for no limit.
FOREVER = 2**32 - 1


class Type(enum.IntEnum):
    """`ubcollDataType_t`"""

    (
        INT8,
        UINT8,
        INT32,
        UINT32,
        INT64,
        UINT64,
        FLOAT16,
        FLOAT32,
        FLOAT64,
        BFLOAT16,
        INT16,
        UINT16,
    ) = range(12)


class Op(enum.IntEnum):
    """`ubcollRedOp_t`"""

    SUM, PROD, MAX, MIN, AVG, BIT_AND, BIT_OR, BIT_XOR = range(8)


class Error(RuntimeError):
    """What a call was refused for, or why the communicator is broken.

    `code` is the number of `ubcollResult_t`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Id(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("host", c_char_p),
        ("address", c_char_p),
        ("timeout_ms", c_uint32),
        ("patience_ms", c_uint32),
        ("queue", c_uint32),
        ("any_order", c_int),
        ("logical", c_int),
        ("shape", c_char_p),
    ]


class Counters(ctypes.Structure):
    """`ubcollCounters_t`"""

    _fields_ = [
        (name, c_uint64) for name in ("operations", "paths_failed", "streams_moved", "frames_again")
    ]


_HANDLE, _PLACE = c_void_p, POINTER(c_void_p)
_ARGUMENTS = {
    "ubcollGetUniqueId": [POINTER(_Id)],
    "ubcollCommInitRankConfig": [_PLACE, c_int, _Id, c_int, POINTER(_Config)],
    "ubcollCommFinalize": [_HANDLE],
    "ubcollCommDestroy": [_HANDLE],
    "ubcollCommAbort": [_HANDLE],
    "ubcollCommGetCounters": [_HANDLE, POINTER(Counters)],
    "ubcollAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, _HANDLE, _PLACE],
    "ubcollReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, _HANDLE, _PLACE],
    "ubcollBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, _HANDLE, _PLACE],
    "ubcollAllGather": [c_void_p, c_void_p, c_size_t, c_int, _HANDLE, _PLACE],
    "ubcollReduceScatter": [c_void_p, c_void_p, c_size_t, c_int, c_int, _HANDLE, _PLACE],
    "ubcollAllToAll": [c_void_p, c_void_p, c_size_t, c_int, _HANDLE, _PLACE],
    "ubcollAllToAllv": [
        c_void_p,
        POINTER(c_size_t),
        c_void_p,
        POINTER(c_size_t),
        c_int,
        _HANDLE,
        _PLACE,
    ],
    "ubcollBarrier": [_HANDLE, _PLACE],
    "ubcollSend": [c_void_p, c_size_t, c_int, c_int, _HANDLE, _PLACE],
    "ubcollRecv": [c_void_p, c_size_t, c_int, c_int, _HANDLE, _PLACE],
    "ubcollSendTag": [c_void_p, c_size_t, c_int, c_int, c_uint64, _HANDLE, _PLACE],
    "ubcollRecvTag": [c_void_p, c_size_t, c_int, c_int, c_uint64, _HANDLE, _PLACE],
    "ubcollRequestResult": [_HANDLE],
    "ubcollRequestSource": [_HANDLE, POINTER(c_int)],
    "ubcollRequestTest": [_HANDLE, POINTER(c_int)],
    "ubcollRequestWait": [_HANDLE],
    "ubcollRequestSleep": [_HANDLE, c_uint32, POINTER(c_int)],
    "ubcollRequestDrive": [_HANDLE, c_uint32, POINTER(c_int)],
    "ubcollRequestNotify": [_HANDLE, _HANDLE, c_uint64],
    "ubcollQueueCreate": [_PLACE],
    "ubcollQueueWait": [_HANDLE, c_uint32, POINTER(c_uint64), POINTER(c_int)],
    "ubcollQueueDestroy": [_HANDLE],
    "ubcollCommSetTimeout": [_HANDLE, c_uint32],
}


@functools.cache
def _library() -> ctypes.CDLL:
    named, beside = os.environ.get(VARIABLE), Path(__file__).with_name(NAME)
    path = named or (str(beside) if beside.exists() else NAME)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        hint = f"`make all` builds it; name it in {VARIABLE}"
        raise OSError(f"{path} cannot be loaded ({error}): {hint}") from error
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.ubcollGetLastError.restype = c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        raise Error(code, _library().ubcollGetLastError().decode(errors="replace"))


def unique_id() -> str:
    """An id for all ranks of one communicator, who meet at this process."""
    made = _Id()
    _call("ubcollGetUniqueId", byref(made))
    return bytes(made.internal).decode()


class Queue:
    """Tells of requests that are over, to any number of threads."""

    def __init__(self) -> None:
        self._handle = c_void_p()
        _call("ubcollQueueCreate", byref(self._handle))

    def wait(self) -> int | None:
        """The next tag, asleep; None: the queue was destroyed."""
        tag, got = c_uint64(), c_int()
        try:
            _call("ubcollQueueWait", self._handle, FOREVER, byref(tag), byref(got))
        except Error:
            return None
        return tag.value if got.value else None

    def destroy(self) -> None:
        """Wakes all who wait."""
        _call("ubcollQueueDestroy", self._handle)


class Request:
    """An operation under way. Any number of threads may drive it; one of them ends it once it is
    over."""

    def __init__(self, handle: c_void_p) -> None:
        self._handle = handle
        self._ended = False
        self._outcome: tuple[int | None, Error | None] | None = None

    def drive(self, timeout_ms: int) -> bool:
        """Does its work until it is over, or for a time. Whether it is over."""
        done = c_int()
        try:
            _call("ubcollRequestDrive", self._handle, timeout_ms, byref(done))
        except Error:
            if self._ended:
                return True
            raise
        return bool(done.value)

    def notify(self, queue: Queue, tag: int) -> None:
        """Puts the tag into the queue once it is over; an error if it was ended."""
        _call("ubcollRequestNotify", self._handle, queue._handle, tag)

    def end(self) -> int | None:
        """Waits until it is over; an error says that it failed. Gives the rank that has sent, for a
        receive from any rank. By one thread at a time; one that was interrupted by a signal may
        call it again."""
        if self._outcome is None:
            self._ended = True
            self.drive(FOREVER)
            sender, failure = c_int(-1), None
            try:
                _call("ubcollRequestSource", self._handle, byref(sender))
                _call("ubcollRequestResult", self._handle)
            except Error as what:
                failure = what
            self._outcome = (None if sender.value < 0 else sender.value, failure)
        # Only now may it go: a signal's handler may have raised before what came of it was kept.
        _library().ubcollRequestWait(self._handle)
        source, error = self._outcome
        if error is not None:
            raise error
        return source


class Communicator:
    """A rank's end. Its operations have the names and the arguments of the header, less
    communicator and request."""

    def __init__(
        self,
        ranks: int,
        rank: int,
        unique_id: str,
        *,
        host: str | None = None,
        address: str | None = None,
        timeout_ms: int = 0,
        patience_ms: int = 0,
        queue: int = 0,
        any_order: bool = False,
        shape: str | None = None,
    ) -> None:
        self._handle = c_void_p()
        host_, address_, shape_ = (
            None if value is None else value.encode() for value in (host, address, shape)
        )
        limits = (timeout_ms, patience_ms, queue, any_order, False)
        config = _Config(ctypes.sizeof(_Config), host_, address_, *limits, shape_)
        place, common = byref(self._handle), _Id(unique_id.encode())
        _call("ubcollCommInitRankConfig", place, ranks, common, rank, byref(config))

    def begin(self, name: str, *arguments: Any) -> Request:
        """Queues an operation, `AllReduce` say."""
        request = c_void_p()
        _call("ubcoll" + name, *arguments, self._handle, byref(request))
        return Request(request)

    def counters(self) -> Counters:
        """What has happened so far."""
        counters = Counters()
        _call("ubcollCommGetCounters", self._handle, byref(counters))
        return counters

    def set_timeout(self, timeout_ms: int) -> None:
        """How long an operation may stand still from now on, at this rank."""
        _call("ubcollCommSetTimeout", self._handle, timeout_ms)

    def finalize(self) -> None:
        """Begins nothing more, gives up receives of which nothing has come, and tells the other
        ranks. What else is under way goes on."""
        _call("ubcollCommFinalize", self._handle)

    def destroy(self) -> None:
        """Finalizes, waits for what is under way and leaves."""
        _call("ubcollCommDestroy", self._handle)

    def abort(self) -> None:
        """Ends what is under way with an error, at all ranks."""
        _call("ubcollCommAbort", self._handle)
