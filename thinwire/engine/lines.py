"""Lines: a small connection to every other rank, for news that no collective can carry.

Every rank tells every other one, twice a second, that it is there and how far it is; at once, what
went wrong, what it waits for (`meet`), and that it leaves. So whoever waits in vain can say for
whom, and nobody needs the rendezvous store, whose host may be the rank that is lost.

A line is no data path: nothing but short texts and numbers, all of bounded size.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import astuple

from thinwire.engine import blame
from thinwire.engine.blame import LOST, Known, Place

PULSE = 0.5  # seconds between two signs of life
GRACE = 1.0  # seconds an exchange may still take to end once a rank has left
LONGEST = 1 << 12  # bytes of a message; a longer one is cut by who sends it
HURRY = 0.2  # seconds in which messages on other lines, or a verb's last bytes, may yet arrive
HEAD = struct.Struct("!BI")  # kind, bytes that follow
PLACE = struct.Struct("!qqq?")  # a Place
HERE, FAILED, MEET, REFUSED, LEFT = range(5)


class Lines:
    """The lines of one rank to all others of its group."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.place = Place()  # ours, as pulses tell it
        self.failure: str | None = None  # the first of which we know, whoever's it is
        self.failed_at = 0.0
        self.refusals: dict[str, str] = {}
        self._met: dict[str, dict[int, float]] = {}  # who has come where, and when
        self._over: set[str] = set()
        self._change = threading.Condition()
        self._sockets = sockets
        self._buffers = {other: bytearray() for other in sockets}  # of messages that began to come
        self._known = {other: Known() for other in sockets}
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for other, connection in sockets.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, other)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="thinwire lines", daemon=True)
        self._thread.start()
        _open.add(self)

    def tell_failure(self, text: str) -> None:
        """Tell everybody that a rank, ours or another, is lost, and why."""
        self._learn(text)
        self._send(FAILED, text.encode())

    def tell_meeting(self, label: str) -> None:
        """We have come to `label`."""
        self._send(HERE, PLACE.pack(*astuple(self.place)))
        self._send(MEET, label.encode())

    def tell_refusal(self, label: str, text: str) -> None:
        """We cannot come to `label`: whoever does gets this text."""
        self._send(REFUSED, f"{label}\n{text}".encode())
        self.forget(label)

    def there(self, label: str) -> set[int]:
        """The other ranks that have come to `label`."""
        with self._change:
            return set(self._met.get(label, ()))

    def forget(self, label: str) -> None:
        """That meeting is over."""
        with self._change:
            self._over.add(label)
            self._met.pop(label, None)

    def elsewhere(self, label: str | None) -> str | None:
        """A rank that has come to a meeting we are not in, and will not do what we wait for."""
        now = time.monotonic()
        with self._change:
            for met, ranks in self._met.items():
                for other, at in ranks.items():
                    # who has behind it what we are in: its data may still be on the way
                    done = self._known[other].place.done > self.place.done
                    if met == label or now - at < HURRY or done:
                        continue
                    here = f"in {self.place}" if label is None else f"at {shown(label)}"
                    return (
                        f"rank {other} has come to {shown(met)}, while rank {self.rank} is {here}; "
                        "all ranks must do the same, between the same two steps"
                    )
        return None

    def wait(self, seconds: float) -> None:
        """Until there is news, at most so long."""
        with self._change:
            self._change.wait(seconds)

    def gone(self, patience: float) -> str | None:
        """The first rank that left, or was lost, so many seconds ago: an exchange waits for it in
        vain."""
        now = time.monotonic()
        for other, known in sorted(self._known.items(), key=lambda item: item[1].left_at):
            long_ago = known.left is not None and now - known.left_at >= patience
            if long_ago and known.owes(self.place):
                return f"rank {other} {known.left}"
        return None

    def lost_before_failure(self) -> bool:
        """Whether a rank was lost before anything was told: what was told may be its doing."""
        everyone = self._known.values()
        return any(known.left == LOST and known.left_at < self.failed_at for known in everyone)

    def missing(self, waited: float) -> str:
        """Who keeps an exchange from ending that has lasted for so many seconds."""
        return blame.missing(self.rank, self.place, self._known, waited, 3 * PULSE)

    def absent(self, waited: float) -> str | None:
        """Who left, or has been silent for a good part of so many seconds."""
        return blame.gone(self.rank, self.place, self._known, waited, 3 * PULSE)

    def leave(self, why: str, patience: float) -> None:
        """Say that we go, wait for the others to say so too, at most so long, and close."""
        if self._closing:
            return
        self._send(HERE, PLACE.pack(*astuple(self.place)))
        self._send(LEFT, why.encode())
        ours = threading.current_thread() is self._thread  # of a garbage collection: cannot listen
        deadline = time.monotonic() + (0.0 if ours else patience)
        while time.monotonic() < deadline and self.failure is None:
            if all(known.left is not None for known in self._known.values()):
                break
            self.wait(deadline - time.monotonic())
        self._closing = True
        self._wake.send(b".")
        if not ours:
            self._thread.join()

    def close_sockets(self) -> None:
        """Let go of the descriptors, without a word: also what a forked child does."""
        self._selector.close()
        for connection in (self._wake, self._woken, *self._sockets.values()):
            connection.close()

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self.close_sockets()

    def _listen(self) -> None:
        due = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= due:
                self._send(HERE, PLACE.pack(*astuple(self.place)))
                due = now + PULSE
            for key, _ in self._selector.select(max(0.0, due - now)):
                if key.data is None:
                    self._woken.recv(64)
                else:
                    self._receive(key.data)

    def _receive(self, other: int) -> None:
        try:
            data = self._sockets[other].recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._buffers[other] += data
        self._known[other].heard = time.monotonic()
        if not data or not self._parse(other, self._buffers[other]):
            self._drop(other, LOST)

    def _parse(self, other: int, buffer: bytearray) -> bool:
        """Take the whole messages out of the buffer; False if these bytes are none of ours."""
        while len(buffer) >= HEAD.size:
            kind, size = HEAD.unpack_from(buffer)
            if kind > LEFT or size > LONGEST or (kind == HERE and size != PLACE.size):
                return False
            if len(buffer) < HEAD.size + size:
                return True
            body = bytes(buffer[HEAD.size : HEAD.size + size])
            del buffer[: HEAD.size + size]
            if kind == HERE:
                self._known[other].place = Place(*PLACE.unpack(body))
            else:
                self._take(other, kind, body.decode("utf-8", "replace"))
        return True

    def _take(self, other: int, kind: int, text: str) -> None:
        if kind == FAILED:
            self._learn(text)
        elif kind == LEFT:
            self._drop(other, text)
        with self._change:
            if kind == MEET:
                if text not in self._over:
                    self._met.setdefault(text, {})[other] = time.monotonic()
            elif kind == REFUSED:
                label, _, reason = text.partition("\n")
                self.refusals.setdefault(label, reason)
            self._change.notify_all()

    def _learn(self, text: str) -> None:
        with self._change:
            if self.failure is None:
                self.failure, self.failed_at = text, time.monotonic()
            self._change.notify_all()

    def _drop(self, other: int, why: str) -> None:
        known = self._known[other]
        with self._change:
            if known.left is None:
                known.left, known.left_at = why, time.monotonic()
                self._selector.unregister(self._sockets[other])
            self._change.notify_all()

    def _send(self, kind: int, body: bytes) -> None:
        """To everybody, without waiting: whoever does not read has missed it."""
        message = HEAD.pack(kind, len(body[:LONGEST])) + body[:LONGEST]
        for connection in self._sockets.values():
            try:
                sent = connection.send(message)
            except OSError:  # full, or broken: then the reading side notices, and says so
                continue
            if sent < len(message):  # half a message would garble all that follow
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def shown(label: str) -> str:
    """A meeting's label without its number."""
    return label.rsplit(" #", 1)[0]


_open: weakref.WeakSet[Lines] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child (a DataLoader's worker) would hold the lines open when its parent dies."""
    for lines in list(_open):
        lines.close_sockets()


os.register_at_fork(after_in_child=_in_child)
