"""How ranks find one another: whatever an earlier group left in the store, and if it is silent."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from thinwire.engine import rendezvous


def gather(store: Any, world: int) -> list[tuple[dict[int, socket.socket], str]]:
    with ThreadPoolExecutor(world) as ranks:
        return list(
            ranks.map(lambda rank: rendezvous.meet(store, range(world), rank, 60.0), range(world))
        )


def test_every_rank_has_a_line_to_every_other_and_all_name_the_group_alike() -> None:
    store = dist.HashStore()
    first = gather(store, 4)
    second = gather(store, 4)  # over the records of the first
    for met in (first, second):
        assert len({name for _, name in met}) == 1
        for rank, (sockets, _) in enumerate(met):
            assert sorted(sockets) == [other for other in range(4) if other != rank]
            for other, line in sockets.items():
                line.sendall(bytes([10 * rank + other]))
        for rank, (sockets, _) in enumerate(met):
            for other, line in sockets.items():
                line.settimeout(10.0)
                assert line.recv(1) == bytes([10 * other + rank])
                line.close()
    assert first[0][1] != second[0][1]


def test_a_record_that_changes_between_two_of_its_hosts_is_not_mixed_with_the_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first host of an old record is refused; by the time of the second there is a new one."""
    store, real, first = dist.HashStore(), rendezvous._greet, threading.Event()
    gather(store, 2)

    def greeted(board: Any, lower: int, mark: bytes, *rest: Any) -> socket.socket | None:
        if not first.is_set():
            first.set()
            while board.records[lower][0] == mark:
                time.sleep(0.005)
            return None
        return real(board, lower, mark, *rest)

    monkeypatch.setattr(rendezvous, "_greet", greeted)
    with ThreadPoolExecutor(2) as ranks:
        late = ranks.submit(rendezvous.meet, store, range(2), 1, 60.0)
        assert first.wait(60.0)
        early = ranks.submit(rendezvous.meet, store, range(2), 0, 60.0)
        assert late.result()[1] == early.result()[1]


def test_a_stranger_behind_an_old_record_is_not_taken_for_a_rank() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.listen()
        old = json.dumps(["00" * rendezvous.MARK, stranger.getsockname()[1], ["127.0.0.1"]])
        store.set(f"{rendezvous.key(range(2))}/0", old)
        with ThreadPoolExecutor(2) as ranks:
            late = ranks.submit(rendezvous.meet, store, range(2), 1, 60.0)
            answering, _ = stranger.accept()
            answering.sendall(b"x" * 200)
            early = ranks.submit(rendezvous.meet, store, range(2), 0, 60.0)
            for sockets, _ in (late.result(), early.result()):
                for line in sockets.values():
                    line.close()
        answering.close()


def test_a_rank_that_does_not_come_is_named_within_the_time_out() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 1 found no way to rank 0, rank 2 within 1 s"):
        rendezvous.meet(dist.HashStore(), range(3), 1, 1.0)
    assert time.monotonic() - begun < 30.0


class _Silent:
    """A store whose host is stopped: every question waits for ever."""

    def clone(self) -> Any:
        threading.Event().wait()


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError, match="rank 0 does not answer, nor does the rendezvous store"):
        rendezvous.meet(_Silent(), range(2), 1, 0.5)  # type: ignore[arg-type]


def test_one_that_is_stopped_keeps_nobody_from_the_others() -> None:
    """Rank 1's machine takes connections, and nobody there answers."""
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        record = json.dumps(["00" * rendezvous.MARK, stopped.getsockname()[1], ["127.0.0.1"]])
        store.set(f"{rendezvous.key(range(4))}/1", record)
        with ThreadPoolExecutor(3) as ranks:
            met = [ranks.submit(rendezvous.meet, store, range(4), r, 3.0) for r in (0, 2, 3)]
            for rank, said in zip((0, 2, 3), met, strict=True):
                with pytest.raises(TimeoutError, match=f"rank {rank} found no way to rank 1 with"):
                    said.result()


def test_a_store_that_ends_early_is_no_matter_to_those_who_have_read_it() -> None:
    """Its host has given up on the one that is missing, and taken the store with it."""

    class Ends:
        def __init__(self, store: Any) -> None:
            self.store, self.ended = store, threading.Event()

        def clone(self) -> Any:
            return self

        def set(self, key: str, value: str) -> None:
            self.store.set(key, value)

        def check(self, keys: list[str]) -> bool:
            if self.ended.is_set():
                raise RuntimeError("Connection reset by peer")
            return bool(self.store.check(keys))

        def get(self, key: str) -> bytes:
            return bytes(self.store.get(key))

    store: Any = Ends(dist.HashStore())
    with ThreadPoolExecutor(2) as ranks:
        met = [ranks.submit(rendezvous.meet, store, range(3), r, 3.0) for r in (0, 1)]
        time.sleep(1.0)
        store.ended.set()
        for rank, said in enumerate(met):
            with pytest.raises(TimeoutError, match=f"rank {rank} found no way to rank 2 within"):
                said.result()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 0 does not answer.*\(Connection reset by peer\)"):
        rendezvous.meet(store, range(3), 2, 300.0)
    assert time.monotonic() - begun < 150.0, "nothing more can come, so nobody waits for it"


def test_what_cannot_be_reached_is_told_with_the_variable_and_the_interfaces() -> None:
    store = dist.HashStore()
    record = json.dumps(["00" * rendezvous.MARK, 9, ["192.0.2.1"]])  # of an address for documents
    store.set(f"{rendezvous.key(range(2))}/0", record)
    with pytest.raises(TimeoutError, match=r"set GLOO_SOCKET_IFNAME .* lo 127\.0\.0\.1"):
        rendezvous.meet(store, range(2), 1, 0.3)


def test_a_call_that_takes_too_long_is_given_up() -> None:
    assert rendezvous.within(30.0, lambda: 5) == 5
    with pytest.raises(TimeoutError):
        rendezvous.within(0.05, threading.Event().wait)
    with pytest.raises(KeyError):
        rendezvous.within(30.0, lambda: {}["x"])
