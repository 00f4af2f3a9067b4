"""Buffers that are used again: never while somebody holds a tensor in one."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire import scratch

CPU, N = torch.device("cpu"), 100_000


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(scratch, "_pool", scratch._Pool())


def test_memory_is_used_again_once_no_tensor_lies_in_it():
    first = scratch.empty(N, torch.float32, CPU)
    place, part = first.data_ptr(), first[10:20]
    assert scratch.empty(N, torch.float32, CPU).data_ptr() != place
    del first
    assert scratch.empty(N, torch.float32, CPU).data_ptr() != place  # a view of it is alive
    view = part.view(torch.int32)
    del part
    assert scratch.empty(N, torch.float32, CPU).data_ptr() != place
    del view
    assert scratch.empty(N - 5, torch.float32, CPU).data_ptr() == place


def test_types_share_memory_and_sizes_far_apart_do_not():
    place = scratch.empty(N, torch.float32, CPU).data_ptr()
    assert scratch.empty(4 * N, torch.uint8, CPU).data_ptr() == place
    assert scratch.empty(N // 2 - 1, torch.float32, CPU).data_ptr() != place
    assert scratch.empty(N + 1, torch.float32, CPU).data_ptr() != place


def test_small_ones_are_torchs():
    assert scratch.empty(10, torch.float32, CPU).shape == (10,)
    assert not scratch._pool.blocks


def test_blocks_that_serve_nobody_are_given_back(monkeypatch):
    monkeypatch.setattr(scratch, "IDLE", 3)
    held = scratch.empty(8 * N, torch.float32, CPU)
    scratch.empty(3 * N, torch.float32, CPU)
    for _ in range(4):
        scratch.empty(N, torch.float32, CPU)
    assert sorted(len(block) // N for block in scratch._pool.blocks) == [4, 12, 32]
    scratch.empty(20 * N, torch.float32, CPU)  # a new one: the time to look
    assert sorted(len(block) // N for block in scratch._pool.blocks) == [4, 32, 80]
    held.zero_()


def test_threads_share_nothing():
    mine, places = scratch.empty(N, torch.float32, CPU).data_ptr(), []
    thread = threading.Thread(
        target=lambda: places.append(scratch.empty(N, torch.float32, CPU).data_ptr())
    )
    thread.start()
    thread.join()
    assert places != [mine]
