"""One pool of worker processes for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton: there is no GPU here

import pytest
import torch
from hypothesis import settings

from tests.processes import Pool, prepare

settings.register_profile("shared machine", deadline=None)  # tests have limits of their own
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(_pools: list[Pool], request: pytest.FixtureRequest) -> Pool:
    """A pool; a new one if the last test broke it."""
    if not _pools or any(not worker.is_alive() for worker in _pools[-1]._workers):
        _pools.append(Pool())
    return _pools[-1]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """While the first tests run, what all processes are forked from gets ready."""
    if any(item.get_closest_marker("slow") for item in session.items):
        prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: the last to begin would be the last to end, alone."""
    long = ("test_every_job_trains", "test_every_kind_in_one_set", "test_demo_is_honest")
    items.sort(key=lambda item: not item.name.startswith(long))
