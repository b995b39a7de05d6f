"""Work of two kinds: own kind first, in order, everything once."""

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.embeds.dataplane.io_workers import DualQueue

THREADS = 4
PIECES = 2000
JOIN_S = 20.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1)), max_size=40))
def test_own_line_first_then_the_other_each_in_order(steps: list[tuple[bool, int]]) -> None:
    lines: DualQueue[tuple[int, int]] = DualQueue()
    waiting: tuple[list[int], list[int]] = ([], [])
    for number, (puts, line) in enumerate(steps):
        if puts:
            lines.put(line, (line, number))
            waiting[line].append(number)
        elif waiting[0] or waiting[1]:
            expected = line if waiting[line] else 1 - line
            assert lines.get(line) == (expected, waiting[expected].pop(0))


def test_who_is_to_end_ends_after_what_was_put() -> None:
    lines: DualQueue[str] = DualQueue()
    lines.put(1, "last")
    lines.close(2)
    assert [lines.get(0) for _ in range(3)] == ["last", None, None]


def test_each_piece_is_taken_once_by_any_number_of_threads() -> None:
    lines: DualQueue[int] = DualQueue()
    taken: list[list[int]] = [[] for _ in range(THREADS)]

    def take(number: int) -> None:
        while (piece := lines.get(number % 2)) is not None:
            taken[number].append(piece)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for piece in range(PIECES):
        lines.put(piece % 3 % 2, piece)
    lines.close(THREADS)
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads)
    assert Counter(piece for each in taken for piece in each) == Counter(range(PIECES))
