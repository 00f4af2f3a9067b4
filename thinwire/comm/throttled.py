"""A link of a given rate, made in software: every verb first waits as long as its bytes would take.

Only link time is simulated: bytes per second on the sending side, counted as `metered` counts them.
Latency, contention and lost packets are not. Because the wait comes before the exchange, peers see
the data late, as they would on such a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from thinwire.comm.metered import Metered
from thinwire.protocols import Comm

T = TypeVar("T")


class Throttled(Metered):
    """A meter whose verbs take at least bytes / rate seconds.

    Args:
        comm: what really exchanges the data.
        rate: bits per second that this rank can send.
        sleep: waits so many seconds; tests pass a clock of their own.
    """

    def __init__(
        self, comm: Comm, rate: float, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if not rate > 0:
            raise ValueError(f"a link's rate must be above 0 bits per second, got {rate!r}")
        super().__init__(comm)
        self.rate, self._sleep = rate, sleep

    def _count(self, verb: str, sent: dict[int, int], call: Callable[[], T]) -> T:
        def send_slowly() -> T:
            self._sleep(8 * sum(sent.values()) / self.rate)
            return call()

        return super()._count(verb, sent, send_slowly)
