"""Replicas on one host share fetches: each reads cells out of the others' host memory."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.threads import NewThreads
from tests.support.waiting import wait_until
from tests.worker.replicas import CHUNKS, LIMIT_S, NUM_CELLS, ReplicaRank, ranks_in_threads
from vllm_kvpool.transfer.ops import Ask, Lent, Returned
from vllm_kvpool.worker import worker_part

HELD_S = 0.2  # so long a rank that closes waits for what it has lent
Maker = Callable[..., list[ReplicaRank]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    made: list[ReplicaRank] = []

    def ranks(size: int, *, host: str = "", **options: object) -> list[ReplicaRank]:
        file = f"file://{tmp_path / 'pool'}?size=64MiB"
        made.extend(new := ranks_in_threads(size, [host, file] if host else file, **options))
        return new

    yield ranks
    for rank in made:
        rank.close()


def have_loaded(ranks: list[ReplicaRank], prompt: int) -> bool:
    """Finish the load of every rank, and return True if each has the whole prompt."""
    loaded = [rank.has_loaded(prompt) for rank in ranks]
    return all(loaded)


def stored(make: Maker, *prompts: int) -> None:
    """Store prompts through another engine."""
    [writer] = make(1)
    for prompt in prompts:
        writer.save(prompt)
    writer.close()


@pytest.mark.parametrize("host", ["", "host://1MiB"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_load_asks_the_store_once_for_each_cell(make: Maker, size: int, host: str) -> None:
    stored(make, 1)
    ranks = make(size, host=host)
    for rank in ranks:
        rank.start_load(1)
    assert have_loaded(ranks, 1)
    assert sum(rank.gets for rank in ranks) == NUM_CELLS
    assert sum(rank.borrowed() for rank in ranks) == NUM_CELLS * (size - 1)
    assert max(rank.gets for rank in ranks) <= -(-CHUNKS // size) * NUM_CELLS / CHUNKS


@pytest.mark.parametrize("host", ["", "host://1MiB"])
def test_each_host_has_a_set_of_its_own(make: Maker, host: str) -> None:
    """Each cell is written once overall, and fetched once per host."""
    writers = make(4, host=host, per_host=2)
    for rank in writers:
        rank.save(1)
    for rank in writers:
        rank.close()
    assert sum(rank.count("kvpool_cells", direction="save") for rank in writers) == NUM_CELLS
    ranks = make(4, host=host, per_host=2)
    for rank in ranks:
        rank.start_load(1)
    assert have_loaded(ranks, 1)
    assert [sum(rank.gets for rank in ranks[i : i + 2]) for i in (0, 2)] == [NUM_CELLS] * 2


def test_a_replica_that_comes_much_later_still_asks_no_store(make: Maker) -> None:
    """Without a host tier, cells stay for replicas that have not asked yet."""
    stored(make, 1)
    ranks = make(3)
    for rank in ranks[:2]:
        rank.start_load(1)
    ranks[2].start_load(1)
    assert have_loaded(ranks, 1)
    assert sum(rank.gets for rank in ranks) == NUM_CELLS


def test_a_replica_lends_what_it_has_no_load_for(make: Maker) -> None:
    """The lender's own plan may be late, or may never come."""
    stored(make, 1)
    first, second = make(2)
    first.start_load(1)
    assert first.has_loaded(1)
    assert (first.gets, second.gets) == (NUM_CELLS / 2, NUM_CELLS / 2)
    assert first.borrowed() == NUM_CELLS / 2


def test_each_keeps_its_part_in_host_memory(make: Maker) -> None:
    """Each replica keeps half of the cells, and both can load all of them without a store."""
    ranks = make(2, host="host://1MiB")
    for rank in ranks:
        rank.save(1)
    for _ in range(2):
        for rank in ranks:
            rank.start_load(1)
        assert have_loaded(ranks, 1)
    assert sum(rank.gets for rank in ranks) == 0
    told = [rank.host_told() for rank in ranks]
    assert [len(groups) for groups in told[0].values()] == [CHUNKS / 2] * 2
    assert told[0].keys() == told[1].keys() == {0, 1}, "each speaks for both"
    assert not told[0][0] & told[1][0]
    assert [rank.num_kept for rank in ranks] == [NUM_CELLS / 2] * 2


def test_what_is_dirty_is_lent_before_any_store_has_it(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_part, "VLLM_SHUTDOWN_S", LIMIT_S)
    back = {"write_policy": "back", "shutdown_timeout_s": LIMIT_S}
    ranks = make(2, host="host://1MiB", **back)
    for rank in ranks:
        rank.save(1)
    for rank in ranks:
        rank.start_load(1)
    assert have_loaded(ranks, 1)
    assert sum(rank.count("kvpool_cells", direction="save") for rank in ranks) == 0
    for rank in ranks:
        rank.close()
    [reader] = make(1)
    reader.start_load(1)
    assert reader.has_loaded(1), "at the end all of it was copied down"


def test_rank_that_closes_puts_dirty_cells_that_are_lent_once_they_are_given_back(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make(2, host="host://1MiB", write_policy="back")
    for rank in ranks:
        rank.save(1)
    exchange = ranks[1].part._exchange
    assert exchange is not None
    send, held = exchange.send, list[Returned]()

    def send_or_hold(message: Ask | Lent | Returned) -> None:
        if isinstance(message, Returned):
            held.append(message)
        else:
            send(message)

    monkeypatch.setattr(exchange, "send", send_or_hold)
    for rank in ranks:
        rank.start_load(1)
    assert have_loaded(ranks, 1)
    wait_until(lambda: bool(held), LIMIT_S)
    closing = threading.Thread(target=ranks[0].close)
    closing.start()
    closing.join(HELD_S)
    for message in held:
        send(message)
    closing.join(LIMIT_S)
    assert ranks[0].count("kvpool_cells", direction="save") == NUM_CELLS / 2


def test_each_prefetches_its_part(make: Maker) -> None:
    stored(make, 1)
    ranks = make(2, host="host://1MiB")
    for rank in ranks:
        rank.prefetch(1)
    for rank in ranks:
        rank.start_load(1)
    assert have_loaded(ranks, 1)
    assert sum(rank.gets for rank in ranks) == NUM_CELLS


def test_after_a_reset_nothing_of_before_is_lent(make: Maker) -> None:
    """The lender does not know of the reset yet, so the borrower asks the store. Other engines have
    saved there."""
    stored(make, 1)
    first, second = make(2, host="host://1MiB")
    for rank in (first, second):
        rank.start_load(1)
    assert have_loaded([first, second], 1)
    first.start_load(1, generation=1)
    assert first.has_loaded(1)
    assert first.borrowed("missing") == NUM_CELLS / 2
    second.reset(1)
    second.start_load(1, generation=1)
    assert second.has_loaded(1)
    assert second.borrowed("missing") == 0


def test_what_no_store_has_ends_the_load_of_each(make: Maker) -> None:
    ranks = make(2)
    for rank in ranks:
        rank.start_load(1)
    assert [bool(rank.finish_load().invalid_blocks) for rank in ranks] == [True, True]


@pytest.mark.parametrize("staging", ["64KiB"])
def test_few_slots_are_enough(make: Maker, staging: str) -> None:
    """Replicas wait for slots of each other, but never deadlock."""
    stored(make, 1, 2, 3)
    ranks = make(3, staging_bytes=staging)
    for prompt in (1, 2, 3):
        for rank in ranks:
            rank.start_load(prompt)
        assert have_loaded(ranks, prompt)


def test_where_a_rank_has_heads_of_its_own_nothing_is_opened(tmp_path: Path) -> None:
    def refuse(data: bytes) -> list[bytes]:
        raise AssertionError("nobody needs to meet")

    threads = NewThreads()
    rank = ReplicaRank(0, 1, f"file://{tmp_path}?size=64MiB", refuse)
    assert not threads.alive("kvpool-replicas")
    rank.close()
