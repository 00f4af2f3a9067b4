"""How the ranks of a group find one another: addresses through the store, then a line to each.

The store is asked by a thread of its own: a store whose host does not answer would keep whoever
asks it for ever. A record there may be of an earlier group over the same ranks; so both ends of a
line say which record they mean, and a rank whose record was not the newest tries again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

MAGIC = b"thinwire line 1\n"
MARK = 16  # bytes that tell one record from another
HELLO = struct.Struct(f"!{len(MAGIC)}sI{MARK}s{MARK}s")  # rank, its record, the record it read
KNOCK = 1.0  # seconds to try one address
SILENT = 2.0  # seconds without an answer after which a store is not there
T = TypeVar("T")
_Found = tuple[int, socket.socket, bytes]  # a rank, the line to it, the mark of its record
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meet(
    store: Store, ranks: Sequence[int], rank: int, timeout: float
) -> tuple[dict[int, socket.socket], str]:
    """A connection to every other rank of the group, and a name of the group that is its alone."""
    board = _Board(store, key(ranks), rank, len(ranks))
    deadline = time.monotonic() + timeout
    found: queue.SimpleQueue[_Found] = queue.SimpleQueue()
    for lower in range(rank):  # side by side: one that is lost keeps nobody from the others
        knocking = threading.Thread(
            target=_connect, args=(board, lower, found), name="thinwire rendezvous", daemon=True
        )
        knocking.start()
    sockets: dict[int, socket.socket] = {}
    marks = {rank: board.mark}
    try:
        while len(sockets) < len(ranks) - 1:
            missing = [r for r in range(len(ranks)) if r not in marks]
            if time.monotonic() > deadline or (board.error is not None and 0 in missing):
                raise TimeoutError(_unreached(board, rank, missing, timeout))
            for other, connection, mark in (*_arrived(found), *_accept(board, set(sockets))):
                sockets[other], marks[other] = connection, mark
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    finally:
        board.close()
    together = b"".join(marks[r] for r in range(len(ranks)))
    return sockets, hashlib.sha256(together).hexdigest()[:16]


def key(ranks: Sequence[int]) -> str:
    """Where in the store a group of these ranks has its records."""
    return "thinwire/" + hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result; TimeoutError if it has none in time, in a thread that may then linger."""
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:  # raised where the caller waits
            answer.put((None, error))

    threading.Thread(target=run, name="thinwire rendezvous", daemon=True).start()
    try:
        value, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class _Board:
    """What ranks write into the store, and a socket that waits for those who have read it."""

    def __init__(self, store: Store, place: str, rank: int, size: int) -> None:
        self.mark, self.rank, self.size = secrets.token_bytes(MARK), rank, size
        self.listener = _listener()
        port = self.listener.getsockname()[1]
        self.record = json.dumps([self.mark.hex(), port, addresses()])
        self.records: dict[int, tuple[bytes, int, list[str]]] = {}
        self.error: Exception | None = None
        self.answered = time.monotonic()  # when the store last did
        self.done = threading.Event()
        self._thread = threading.Thread(
            target=self._trade, args=(store, place), name="thinwire rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.done.set()
        self.listener.close()
        self._thread.join(1.0)  # longer only if the store does not answer

    def _trade(self, store: Store, place: str) -> None:
        try:
            own: Any = store.clone()  # type: ignore[attr-defined]  # the caller's would be locked while it waits for an answer
            own.set(f"{place}/{self.rank}", self.record)
            while not self.done.is_set():
                for lower in range(self.rank):
                    if own.check([f"{place}/{lower}"]):
                        self.records[lower] = _parse(own.get(f"{place}/{lower}"))
                own.check([place])
                self.answered = time.monotonic()
                self.done.wait(0.02)
        except (RuntimeError, ValueError) as error:
            self.error = error


def _parse(record: bytes) -> tuple[bytes, int, list[str]]:
    mark, port, hosts = json.loads(record)
    if not (isinstance(port, int) and 0 < port < 65536 and isinstance(hosts, list)):
        raise ValueError(f"no record of thinwire: {record!r:.80}")
    return bytes.fromhex(mark), port, [str(host) for host in hosts]


def _connect(board: _Board, lower: int, found: queue.SimpleQueue[_Found]) -> None:
    """A line to a lower rank, once its record is there and is that of this group."""
    while not board.done.is_set():
        record = board.records.get(lower)
        if record is not None:
            mark, port, hosts = record  # this one for all its hosts: a newer one has another mark
            for host in hosts:
                connection = _greet(board, lower, mark, (host, port))
                if connection is not None:
                    found.put((lower, connection, mark))
                    return
        time.sleep(0.01)


def _arrived(found: queue.SimpleQueue[_Found]) -> Iterator[_Found]:
    with suppress(queue.Empty):
        while True:
            yield found.get_nowait()


def _greet(board: _Board, lower: int, mark: bytes, where: tuple[str, int]) -> socket.socket | None:
    """The connection, if whoever listens there is the rank whose record has this mark."""
    try:
        connection = socket.create_connection(where, timeout=KNOCK)
    except OSError:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connection.sendall(HELLO.pack(MAGIC, board.rank, board.mark, mark))
        answer = _read(connection, lambda: not board.done.is_set() and _newest(board, lower, mark))
        if answer == HELLO.pack(MAGIC, lower, mark, board.mark):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _soon() -> Callable[[], bool]:
    deadline = time.monotonic() + KNOCK
    return lambda: time.monotonic() < deadline


def _newest(board: _Board, lower: int, mark: bytes) -> bool:
    """Whether that rank has not begun anew meanwhile."""
    return board.records[lower][0] == mark


def _read(connection: socket.socket, wanted: Callable[[], bool]) -> bytes:
    """One greeting, or as much of it as came while it was wanted."""
    connection.settimeout(0.1)
    got = b""
    while len(got) < HELLO.size and wanted():
        try:
            more = connection.recv(HELLO.size - len(got))
        except TimeoutError:
            continue
        if not more:
            break
        got += more
    return got


def _accept(board: _Board, known: set[int]) -> Iterator[_Found]:
    """The next of the higher ranks that means our record, if one comes in a moment."""
    board.listener.settimeout(0.05)
    try:
        connection, _ = board.listener.accept()
    except TimeoutError:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        hello = _read(connection, _soon())
        if len(hello) == HELLO.size:
            magic, rank, mark, ours = HELLO.unpack(hello)
            wanted = board.rank < rank < board.size and rank not in known
            if magic == MAGIC and ours == board.mark and wanted:
                connection.sendall(HELLO.pack(MAGIC, board.rank, board.mark, mark))
                yield rank, connection, mark
                return
    except OSError:
        pass
    connection.close()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def interfaces() -> dict[str, str]:
    """The network interfaces of this machine and their IPv4 addresses (Linux; else none)."""
    try:
        import fcntl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def addresses() -> list[str]:
    """Where this rank may be reached, the likeliest first: what the user names, what the host
    name resolves to, every interface, and loopback at last."""
    here = interfaces()
    named = [name for v in VARIABLES for name in os.environ.get(v, "").split(",")]
    chosen = [here[name] for name in named if name in here]
    try:
        resolved = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        resolved = []
    order = [*chosen, *resolved, *here.values(), "127.0.0.1"]
    unique = list(dict.fromkeys(order))
    return sorted(unique, key=lambda host: host.startswith("127.") or host == "::1")


def named_interfaces() -> str:
    """For messages: which interfaces there are."""
    return ", ".join(f"{name} {address}" for name, address in interfaces().items()) or "unknown"


def _unreached(board: _Board, rank: int, missing: list[int], timeout: float) -> str:
    names = ", ".join(f"rank {r}" for r in missing)
    quiet = time.monotonic() - board.answered
    if 0 in missing and (board.error is not None or quiet > min(SILENT, timeout / 2)):
        return (
            "rank 0 does not answer, nor does the rendezvous store, which it hosts unless a "
            f"launcher does ({board.error or f'silent for {quiet:.0f} s'})"
        )
    return (
        f"rank {rank} found no way to {names} within {timeout:.0f} s: not come to attach or "
        "distribute, or on a machine that cannot be reached from here; then set "
        f"{' or '.join(VARIABLES)} to the interface that leads there (here are "
        f"{named_interfaces()})"
    )
