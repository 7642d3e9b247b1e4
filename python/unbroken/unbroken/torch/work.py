"""How an operation ends.

An `Operation` is one request of the library with the memory that it works on. It is held by its
backend until it is over, whatever becomes of the program's `Work`, so that memory which the library
reads or writes is never freed under it.

| state | event | by whom |
| --- | --- | --- |
| begun | the library has done with it | any thread that drives: who waits, or the library's own thread |
| → claimed | a thread ends the request and copies results; if a signal's handler raises meanwhile it is begun again, and goes on | the first that finds it done: who waits or looks, or a completer |
| → over | memory is let go of, waiters wake; then callbacks run | callbacks: by completers alone |

Who waits drives the library and holds nothing: operations are begun, looked at and waited for by
any number of threads meanwhile. Completers are threads of the process that sleep until the library
says that an operation is over whose end is to be told (it has a future, or nobody has waited for
it). There is always one more that sleeps while others run callbacks, so a callback may wait for
another operation.
"""

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from .. import coll
from .tensors import copy_back

# How long a wait stays in the library at one time: signals (Ctrl-C) are seen in between.
_SLICE_S = 0.5
# How often who waits for another thread to copy results looks whether that was interrupted.
_LOOK_S = 0.1
# Completers that are kept asleep, and that there can be: callbacks that wait for operations whose
# callbacks wait, and so on.
_KEPT, _MOST = 2, 64
# How long completers are waited for when the process ends.
_JOIN_S = 10

_builtin_timeout = TimeoutError


class TimeoutError(dist.DistBackendError, _builtin_timeout):
    """`wait(timeout)` has ended before the operation, which goes on."""


class Operation:
    """A request that is under way, and the memory that it needs until it is over."""

    def __init__(self, backend, request: coll.Request, memory: list, copies: list):
        self._backend, self._request, self._memory, self._copies = backend, request, memory, copies
        # The claim of the thread that ends it: that thread's number, in a list that is its own. One
        # that is interrupted gives it back, and the next goes on. Not a lock: a signal's handler
        # may raise between taking one and knowing that it was taken.
        self._claims = {}
        # Not an Event: that keeps its lock where a handler raises as it is taken. What is put here
        # wakes one who waits, who puts it back.
        self._over, self._end_told = False, SimpleQueue()
        # Reentrant: garbage is collected anywhere, and the end of a Work asks for its operations to
        # be watched.
        self._lock, self._callbacks, self._watched = threading.RLock(), [], False
        self.error = self.source = None
        backend.hold(self)

    def is_over(self) -> bool:
        return self._over

    def forget_results(self) -> None:
        """Nothing is copied when it is over."""
        self._copies = []

    def drive(self, seconds: float | None) -> bool:
        """Does its work until it is over, or for a time; whether it is over."""
        ends = None if seconds is None else time.monotonic() + seconds
        while not self._over:
            left = _SLICE_S if ends is None else ends - time.monotonic()
            if self._request.drive(int(1000 * max(0, min(left, _SLICE_S)))):
                self._finish()
            elif left <= 0:
                return False
        return True

    def _finish(self):
        """The library has done with it. An exception that comes in between (of a signal's handler)
        is its caller's alone."""
        mine = [threading.get_ident()]
        while not self._over:
            try:
                claim = self._claims.setdefault(0, mine)
                if claim is mine:
                    self._end()
            finally:
                if self._claims.get(0) is mine:
                    del self._claims[0]
            if claim is mine or claim == mine:
                # Done; or the collector of garbage came while this thread ends it, which goes on
                # then.
                return
            self._await_end()

    def _await_end(self):
        """Waits a moment for the thread that ends it."""
        try:
            self._end_told.put(self._end_told.get(timeout=_LOOK_S))
        except Empty:
            pass

    def _end(self):
        """Says what came of it, and copies results. What was done is not done again."""
        if self.error is None:
            try:
                self.source = self._request.end()
            except coll.Error as error:
                self.error = dist.DistBackendError(str(error))
        while self._copies and self.error is None:
            copy_back(self._copies[-1:])
            self._copies.pop()
        self._memory = self._copies = ()
        self._backend.release(self)
        with self._lock:
            self._over = True
            self._end_told.put(None)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Calls it once when this is over: by a completer, or now if it is over already."""
        with self._lock:
            over = self._over
            if not over:
                self._callbacks.append(callback)
        if over:
            callback()
        else:
            self.watch()

    def watch(self) -> None:
        """Has a completer end it, whoever else waits."""
        with self._lock:
            watched, self._watched = self._watched, True
        if not watched:
            _completers.watch(self)

    def notify(self, queue: coll.Queue, tag: int) -> None:
        self._request.notify(queue, tag)

    def complete(self) -> None:
        """By a completer: ends it, and runs its callbacks."""
        try:
            self._finish()
        except Exception as error:
            # Copies were checked before it was begun; should one fail all the same, whoever waits
            # is told.
            self.error = error
            self._finish()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _Completers:
    """Threads that end operations which are watched; made with the first backend, ended with the
    process."""

    def __init__(self):
        self._lock, self._queue = threading.Lock(), None
        self._watched, self._tags = {}, itertools.count(1)
        self._threads, self._asleep = set(), 0

    def start(self) -> None:
        """Makes the first one, if there is none."""
        with self._lock:
            if self._queue is None:
                self._queue = coll.Queue()
                self._start()

    def watch(self, operation: Operation) -> None:
        """Takes no lock: the collector of garbage calls it, wherever its thread is."""
        queue, tag = self._queue, next(self._tags)
        if queue is None:
            # The process ends; the backend has it.
            return
        self._watched[tag] = operation
        try:
            operation.notify(queue, tag)
        except coll.Error:
            # It has been ended meanwhile.
            del self._watched[tag]
            operation.complete()

    def _start(self):
        """One more; the lock is held."""
        if len(self._threads) < _MOST:
            thread = threading.Thread(target=self._run, name="unbroken-completer", daemon=True)
            self._threads.add(thread)
            self._asleep += 1
            thread.start()

    def _run(self):
        queue = self._queue
        while (tag := queue.wait()) is not None:
            operation = self._watched.pop(tag)
            with self._lock:
                self._asleep -= 1
                # Whatever its callbacks wait for needs another.
                if not self._asleep:
                    self._start()
            operation.complete()
            del operation
            with self._lock:
                if self._asleep >= _KEPT:
                    break
                self._asleep += 1
        with self._lock:
            self._threads.discard(threading.current_thread())

    def end(self) -> None:
        """Ends the threads. An interpreter that ends while one of them is in PyTorch's code
        aborts."""
        with self._lock:
            queue, self._queue = self._queue, None
            threads = list(self._threads)
        if queue is not None:
            queue.destroy()
        ends = time.monotonic() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0, ends - time.monotonic()))


_completers = _Completers()


def forget_completers() -> None:
    """In a forked child: its parent's threads are not there."""
    _completers.__init__()


def start_completers() -> None:
    """Lets operations of this process be watched."""
    _completers.start()


def end_completers() -> None:
    """Ends the process's completers."""
    _completers.end()


def _results_or_raise(ended: torch.futures.Future) -> list:
    """What a future of a Work gives. `Future.set_exception` would keep an error for Python alone:
    to C++ (DDP's reducer) its future has a value, which is the exception. What a callback raises is
    an error to both."""
    results, error = ended.value()
    if error is not None:
        raise dist.DistBackendError(str(error))
    return results


class Work(dist._Work):
    """What a program waits for: one operation or several."""

    def __init__(self, operations: list, results: list, timeout: timedelta | None = None):
        super().__init__()
        self._operations, self._results = operations, results
        seconds = timeout.total_seconds() if timeout is not None else 0
        self._timeout_s = seconds if seconds > 0 else None
        self._future_lock, self._future = threading.Lock(), None

    def __del__(self):
        # Nobody waits for it any more: its memory is let go of as soon as the library has done with
        # it.
        for operation in getattr(self, "_operations", ()):
            if not operation.is_over():
                operation.watch()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0
        seconds = seconds if seconds > 0 else self._timeout_s
        ends = None if seconds is None else time.monotonic() + seconds
        for operation in self._operations:
            if not operation.drive(None if ends is None else max(0, ends - time.monotonic())):
                raise TimeoutError(f"the operation is under way after {seconds} s")
        if (error := self.exception()) is not None:
            # Each who waits has one of his own: the traceback of one does not grow, and holds
            # nobody else's tensors.
            raise dist.DistBackendError(str(error)) from (
                None if type(error) is dist.DistBackendError else error
            )
        return True

    def is_completed(self) -> bool:
        return all(operation.drive(0) for operation in self._operations)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next(
            (operation.error for operation in self._operations if operation.error is not None), None
        )

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list:
        return self._results

    def source_rank(self) -> int:
        sources = [
            operation.source for operation in self._operations if operation.source is not None
        ]
        return sources[0] if sources else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        with self._future_lock:
            if self._future is not None:
                return self._future
            ended = torch.futures.Future()
            self._future = ended.then(_results_or_raise)
            future = self._future
        results, operations = self._results, self._operations
        # One more than there are operations, for this thread.
        left = itertools.count(len(operations), -1)

        def one_is_over() -> None:
            if next(left) == 0:
                error = next(
                    (operation.error for operation in operations if operation.error is not None),
                    None,
                )
                ended.set_result((results, error))

        for operation in operations:
            operation.when_over(one_is_over)
        one_is_over()
        return future

    # As C++ has it.
    getFuture = get_future
