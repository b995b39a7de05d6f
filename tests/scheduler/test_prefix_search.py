"""The search for a stored prefix (right for every length, in few rounds) and the host index."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.scheduler_bench import layer_group
from vllm_kvpool.identity.keys import (
    CellKey,
    ContextRank,
    HeadShard,
    KeyMaker,
    ParsedKey,
    RankShard,
    chunk_id_of_key,
    key_with_prefix,
    make_namespace,
    with_weights,
)
from vllm_kvpool.layout.topology import (
    AttentionWindow,
    Context,
    LayerGroup,
    Topology,
    cells_of_rank,
)
from vllm_kvpool.scheduler.prefix_search import (
    FANOUT,
    SAMPLES,
    WINDOW_SCAN,
    CellNames,
    ChunkQuestion,
    HitSearch,
    HostCacheIndex,
    PrefixSearch,
    Question,
    largest_boundary,
)
from vllm_kvpool.transfer.ops import HostCacheChange, PrefetchPlan
from vllm_kvpool.transfer.planner import Planner

MAX_CHUNKS = 600
NAMESPACE = make_namespace("model", "0" * 12)


def search(present: list[bool], partly: Sequence[bool] = ()) -> tuple[int, int]:
    """Return (chunks found, rounds). In chunks of `partly`, only the sampled cell is present."""
    state = PrefixSearch(len(present))
    asked: set[ChunkQuestion] = set()
    rounds = 0
    while not state.done:
        questions = state.questions()
        assert questions
        assert list(questions) == sorted(set(questions) - asked)
        assert sum(whole for _, whole in questions) <= FANOUT + 1
        assert sum(not whole for _, whole in questions) <= SAMPLES + 1
        asked.update(questions)
        before = state.found
        answers = [
            present[chunk] or (not whole and chunk < len(partly) and partly[chunk])
            for chunk, whole in questions
        ]
        state.answer(questions, answers)
        assert state.found >= before
        rounds += 1
    assert state.questions() == ()
    assert state.found == 0 or ChunkQuestion(state.found - 1, True) in asked
    return state.found, rounds


def max_rounds(num_chunks: int) -> int:
    """Return the limit of rounds: samples leave 1 / (SAMPLES + 1) each round, then whole chunks."""
    narrowed, rounds = num_chunks, 0
    while narrowed > FANOUT + 1:
        narrowed = -(-narrowed // (SAMPLES + 1))
        rounds += 1
    return rounds + 2


def max_rounds_deceived(num_chunks: int) -> int:
    """Return the limit if samples mislead: 1 / (FANOUT + 1) of the rest is left each round."""
    return max_rounds(num_chunks) + 2 + math.ceil(math.log(max(1, num_chunks), FANOUT + 1))


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 4, 5, 6, 7, 63, 64, 65, 512, MAX_CHUNKS])
def test_every_stored_length_is_found(num_chunks: int) -> None:
    for stored in range(num_chunks + 1):
        found, rounds = search([True] * stored + [False] * (num_chunks - stored))
        assert found == stored
        assert rounds <= (2 if num_chunks <= 512 else max_rounds(num_chunks))


@pytest.mark.parametrize("num_chunks", [4096, 30_000])
def test_a_longer_prompt_takes_a_round_more(num_chunks: int) -> None:
    for stored in (1, 17, num_chunks // 3, num_chunks - 1):
        found, rounds = search([True] * stored + [False] * (num_chunks - stored))
        assert (found, rounds <= 3) == (stored, True)


def test_all_and_nothing_take_one_round() -> None:
    for num_chunks in range(1, 100):
        assert search([True] * num_chunks) == (num_chunks, 1)
        assert search([False] * num_chunks) == (0, 1)
    assert search([]) == (0, 0)


def test_the_last_is_asked_for_whole_and_samples_before() -> None:
    whole, sample = (
        [ChunkQuestion(i, layer_group) for i in range(10)] for layer_group in (True, False)
    )
    assert PrefixSearch(1).questions() == (whole[0],)
    assert PrefixSearch(2).questions() == (whole[0], whole[1])
    state = PrefixSearch(10)
    assert state.questions() == (*sample[:9], whole[9])
    state.answer(state.questions(), [True] * 6 + [False] * 4)
    assert state.found == 0  # samples alone find nothing
    assert state.questions() == (whole[5],)
    state.answer(state.questions(), [False])
    assert not state.done
    assert state.questions() == tuple(whole[:5])


@given(st.lists(st.booleans(), max_size=80))
def test_holes_still_end_at_a_chunk_that_is_there(present: list[bool]) -> None:
    found, rounds = search(present)
    assert rounds <= max_rounds(len(present))
    assert found == 0 or (present[0] and present[found - 1])
    assert found == len(present) or not present[found]


@given(st.integers(0, MAX_CHUNKS), st.integers(0, MAX_CHUNKS), st.randoms(use_true_random=False))
def test_chunks_of_which_some_cells_are_there_are_not_found(
    num_chunks: int, stored: int, random: Random
) -> None:
    stored = min(stored, num_chunks)
    share = random.choice((0.1, 0.5, 0.9, 1.0))
    partly = [random.random() < share for _ in range(num_chunks)]
    found, rounds = search([True] * stored + [False] * (num_chunks - stored), partly)
    assert found == stored
    assert rounds <= max_rounds_deceived(num_chunks)


def test_samples_take_turns_between_the_cells_of_a_chunk() -> None:
    names = CellNames(NAMESPACE, [LayerGroup(Topology(2, 1, ((0, 2),), 1), 16)])
    hashes = [b"\xaa"] * 99
    everything, ends = names.of_questions([Question(7, 0)], hashes)
    assert (everything, ends) == (names.of_chunk(b"\xaa"), [4])
    samples = [Question(i, 0, False) for i in range(8)]
    assert names.of_questions(samples, hashes) == (everything * 2, list(range(1, 9)))
    mixed = [Question(1, 0, False), Question(2, 0), Question(3, 0, False)]
    assert names.of_questions(mixed, hashes) == (
        [everything[1], *everything, everything[3]],
        [1, 5, 6],
    )


@pytest.mark.parametrize("per_head", [True, False])
def test_a_chunk_is_every_head_span_and_context_rank(per_head: bool) -> None:
    topology = Topology(4, 12, ((0, 3), (3, 5)), 2, per_head, context=Context(2, 3))
    names = CellNames(NAMESPACE, [LayerGroup(topology, 16)])
    keys = [ParsedKey.parse(key) for key in names.of_chunk(b"\xaa")]
    shards = [HeadShard(h) for h in range(4)] if per_head else [RankShard(r, 4) for r in range(4)]
    contexts = [ContextRank(d, 3) for d in range(3)]
    expected = {
        ParsedKey(NAMESPACE, context, shard, span, b"\xaa")
        for context in contexts
        for span in topology.all_spans()
        for shard in shards
    }
    assert set(keys) == expected
    assert len(keys) == len(expected)


TP_AND_HEADS = [(1, 4), (2, 4), (4, 4), (8, 4), (6, 2), (1, 1), (4, 1)]


@given(
    st.sampled_from(TP_AND_HEADS),
    st.sampled_from([((0, 6),), ((0, 3), (3, 6)), ((0, 1), (1, 6))]),
    st.integers(1, 7),
    st.booleans(),
    st.data(),
)
def test_cells_are_named_as_ranks_store_them(
    tp_and_heads: tuple[int, int],
    stages: tuple[tuple[int, int], ...],
    span: int,
    per_head: bool,
    data: st.DataObject,
) -> None:
    tp, heads = tp_and_heads
    replicas = max(1, tp // heads)
    context = Context(1, data.draw(st.sampled_from([n for n in (1, 2) if replicas % n == 0])))
    topologies = [
        Topology(heads, tp, stages, span, per_head, layer_group=name, context=context)
        for name in data.draw(st.sampled_from([("",), ("full", "window")]))
    ]
    layer_groups = [LayerGroup(each, row_bytes=16 * (i + 1)) for i, each in enumerate(topologies)]
    chunk_tokens = 32
    stored: dict[str, int] = {}
    for tp_rank in range(tp):
        for pp_rank in range(len(stages)):
            planner = Planner(
                cells_of_rank(layer_groups, tp_rank, pp_rank),
                KeyMaker(NAMESPACE, context.rank(tp_rank, 0)),
                chunk_tokens,
                load_timeout_s=1.0,
                context=context,
            )
            plan = PrefetchPlan("r", (b"\xaa",))
            for slab in planner.prefetch(plan).slabs:
                stored |= dict(zip(slab.cell_keys(), slab.sizes, strict=True))
    key_prefixes = CellNames(NAMESPACE, layer_groups).key_prefixes(chunk_tokens)
    assert {key_with_prefix(prefix, "aa"): nbytes for prefix, nbytes in key_prefixes} == stored
    assert len(key_prefixes) == len(stored)


def test_an_epoch_has_the_same_cells_by_other_names() -> None:
    topology = Topology(4, 12, ((0, 3), (3, 5)), 2, context=Context(2, 3))
    names = CellNames(NAMESPACE, [LayerGroup(topology, 16)])
    assert names.with_weights("") is names
    other = names.with_weights("a")
    assert other.namespace == with_weights(NAMESPACE, "a")
    assert len(of(other)) == len(of(names))
    expected = [replace(ParsedKey.parse(key), namespace=other.namespace) for key in of(names)]
    assert [ParsedKey.parse(key) for key in of(other)] == expected
    assert {chunk_id_of_key(key) for key in of(other)} == {other.chunk_id(b"\xaa")}
    assert other.chunk_id(b"\xaa") != names.chunk_id(b"\xaa")
    assert of(names.with_weights("a")) == of(other) != of(names.with_weights("b"))


def of(names: CellNames) -> list[CellKey]:
    return names.of_chunk(b"\xaa")


# Several kinds of layers


def hit(
    present: Sequence[Sequence[bool]],
    layer_groups: Sequence[LayerGroup],
    chunk_tokens: int,
    block: int,
    exact_chunks: int = 0,
    partly: Sequence[bool] = (),
) -> tuple[int, int, set[Question]]:
    """Return (chunks found, rounds, questions) of a search over `present[layer_group][chunk]`.

    In chunks of `partly`, only the sampled cell is present.
    """
    state = HitSearch(len(present[0]), layer_groups, chunk_tokens, block, exact_chunks)
    asked: set[Question] = set()
    partly_there = {chunk for chunk, there in enumerate(partly) if there}
    rounds = 0
    while not state.done:
        questions = state.questions()
        assert questions
        assert len(set(questions)) == len(questions)
        assert not asked & set(questions)
        asked.update(questions)
        answers = [
            present[q.layer_group][q.chunk] or (not q.whole and q.chunk in partly_there)
            for q in questions
        ]
        state.answer(questions, answers)
        rounds += 1
    assert state.questions() == ()
    return state.found, rounds, asked


def needed(window: AttentionWindow, chunk_tokens: int, block: int, end: int) -> set[int]:
    """Return the chunks that a load up to token `end` writes to; a block is filled whole."""
    first = window.first_read(end) // block * block
    return {token // chunk_tokens for token in range(first, end)}


def is_loadable(
    present: Sequence[Sequence[bool]],
    layer_groups: Sequence[LayerGroup],
    chunk_tokens: int,
    block: int,
    chunks: int,
    first_end: int,
) -> bool:
    """Return True if a load of `chunks` chunks has all it needs at each end from `first_end` on."""
    return all(
        present[i][chunk]
        for i, each in enumerate(layer_groups)
        for end in range(max(0, first_end), chunks * chunk_tokens + 1)
        for chunk in needed(each.window, chunk_tokens, block, end)
    )


REACHES = st.one_of(
    st.builds(AttentionWindow, sliding=st.integers(1, 60)),
    st.builds(AttentionWindow, local=st.integers(1, 60)),
)


@st.composite
def stored(draw: st.DrawFn, *, whole: bool) -> tuple[list[LayerGroup], list[list[bool]], int, int]:
    """Draw layer kinds, present chunks, chunk and block size. Full kinds have a stored prefix."""
    windows = draw(st.lists(REACHES, min_size=0 if whole else 1, max_size=2))
    layer_groups = [layer_group(f"w{i}", window=window) for i, window in enumerate(windows)]
    num_chunks = draw(st.integers(0, 14))
    row = st.lists(
        st.sampled_from((True, True, True, False)), min_size=num_chunks, max_size=num_chunks
    )
    present = [draw(row) for _ in layer_groups]
    if whole:
        for i in range(draw(st.integers(1, 2))):
            place = draw(st.integers(0, len(layer_groups)))
            count = draw(st.integers(0, num_chunks))
            layer_groups.insert(place, layer_group(f"f{i}"))
            present.insert(place, [True] * count + [False] * (num_chunks - count))
    return (
        layer_groups,
        present,
        draw(st.sampled_from((4, 8, 12))),
        draw(st.sampled_from((2, 4, 6, 16))),
    )


def most_rounds(num_chunks: int) -> int:
    """The prefix, its windows, and then so many chunks at once."""
    return max_rounds_deceived(num_chunks) + 2 + -(-num_chunks // WINDOW_SCAN)


@given(stored(whole=True))
def test_the_longest_prefix_is_found_that_has_all_that_is_read(
    case: tuple[list[LayerGroup], list[list[bool]], int, int],
) -> None:
    layer_groups, present, chunk_tokens, block = case
    num_chunks = len(present[0])
    found, rounds, asked = hit(present, layer_groups, chunk_tokens, block)
    # A load ends at a multiple of the block, or a token before the end of the prompt.
    assert is_loadable(
        present, layer_groups, chunk_tokens, block, found, found * chunk_tokens - block + 1
    )
    longest = max(
        n
        for n in range(num_chunks + 1)
        if is_loadable(present, layer_groups, chunk_tokens, block, n, n * chunk_tokens - block)
    )
    assert found == longest
    assert rounds <= most_rounds(num_chunks)
    for i, each in enumerate(layer_groups):
        if not each.window.is_full:  # nothing is taken for granted of these
            stop = found * chunk_tokens
            wanted = needed(each.window, chunk_tokens, block, stop) if stop else set()
            assert {Question(chunk, i) for chunk in wanted} <= asked


@given(stored(whole=True), st.lists(st.integers(0, 13), max_size=3), st.lists(st.booleans()))
def test_an_exact_search_finds_the_longest_prefix_whatever_holes_there_are(
    case: tuple[list[LayerGroup], list[list[bool]], int, int], holes: list[int], partly: list[bool]
) -> None:
    layer_groups, present, chunk_tokens, block = case
    num_chunks = len(present[0])
    for row in present:
        row[:] = [there and chunk not in holes for chunk, there in enumerate(row)]
    found, rounds, _ = hit(present, layer_groups, chunk_tokens, block, num_chunks, partly)
    longest = max(
        n
        for n in range(num_chunks + 1)
        if is_loadable(present, layer_groups, chunk_tokens, block, n, n * chunk_tokens - block)
    )
    assert found == longest
    assert rounds <= most_rounds(num_chunks) + 1


@given(stored(whole=False))
def test_without_layers_that_read_all_what_is_found_has_all_that_is_read(
    case: tuple[list[LayerGroup], list[list[bool]], int, int],
) -> None:
    layer_groups, present, chunk_tokens, block = case
    found, rounds, _ = hit(present, layer_groups, chunk_tokens, block)
    assert rounds <= most_rounds(len(present[0]))
    assert is_loadable(
        present, layer_groups, chunk_tokens, block, found, found * chunk_tokens - block + 1
    )
    if all(map(all, present)):
        assert found == len(present[0])


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 64), st.integers(1, 64))
def test_one_kind_that_reads_all_is_searched_as_a_prefix(
    present: list[bool], chunk_tokens: int, block: int
) -> None:
    """Both searches ask the same questions."""
    state, simple = (
        HitSearch(len(present), [layer_group()], chunk_tokens, block),
        PrefixSearch(len(present)),
    )
    while not simple.done:
        assert not state.done
        chunks = simple.questions()
        assert state.questions() == tuple(Question(chunk, 0, whole) for chunk, whole in chunks)
        assert state.found == simple.found
        answers = [present[chunk] for chunk, _ in chunks]
        state.answer(state.questions(), answers)
        simple.answer(chunks, answers)
    assert state.done
    assert (state.found, state.questions()) == (simple.found, ())


@pytest.mark.parametrize("window", [1, 33, 64, 65, 600, 5000])
@pytest.mark.parametrize("lost", [range(0), range(300, 400), range(0, 590), range(0, 600, 7)])
def test_a_long_search_takes_few_rounds(window: int, lost: range) -> None:
    present = [[True] * MAX_CHUNKS, [chunk not in lost for chunk in range(MAX_CHUNKS)]]
    layer_groups = [layer_group(), layer_group("w", window=AttentionWindow(sliding=window))]
    found, rounds, _ = hit(present, layer_groups, 16, 16)
    assert is_loadable(present, layer_groups, 16, 16, found, found * 16 - 15)
    assert rounds <= most_rounds(MAX_CHUNKS)


def test_chunks_before_the_window_are_not_asked_for() -> None:
    """A store may evict these chunks without losing the hit."""
    layer_groups = [layer_group(), layer_group("w", window=AttentionWindow(sliding=32))]
    present = [[True] * 100, [False] * 97 + [True] * 3]
    found, rounds, asked = hit(present, layer_groups, 16, 16)
    assert (found, rounds) == (100, 2)
    assert {q.chunk for q in asked if q.layer_group == 1} == {97, 98, 99}


# Recurrent states


def state_group(name: str = "s") -> LayerGroup:
    return replace(layer_group(name), is_state=True)


@pytest.mark.parametrize(
    ("bound", "step", "stored", "largest"),
    [
        (0, 1, "", 0),
        (5, 1, "12345", 5),
        (5, 1, "123", 3),
        (5, 1, "", 0),
        (5, 2, "12345", 4),
        (5, 2, "135", 0),
        (5, 2, "2", 2),
        (1, 2, "1", 0),
        (7, 3, "67", 6),
        (2, 1, "345", 0),
    ],
)
def test_the_largest_boundary_has_a_state(bound: int, step: int, stored: str, largest: int) -> None:
    assert largest_boundary(bound, step, lambda b: str(b) not in stored) == largest


def test_attention_before_a_state_is_known_by_itself() -> None:
    present = [[True] * 7 + [False], [True] + [False] * 7]
    search = HitSearch(8, [layer_group(), state_group()], 16, 16)
    while not search.done:
        questions = search.questions()
        search.answer(questions, [present[q.layer_group][q.chunk] for q in questions])
    assert (search.found, search.attention) == (1, 7)


def test_a_model_of_states_alone_needs_a_state() -> None:
    for stored in ([], [3], [0, 5], [7]):
        present = [[chunk in stored for chunk in range(8)]]
        assert hit(present, [state_group()], 16, 16)[0] == max(stored, default=-1) + 1


@st.composite
def stored_states(
    draw: st.DrawFn,
) -> tuple[list[LayerGroup], list[list[bool]], list[list[bool]], int, int]:
    """Layer groups with states, what is present whole and in part, chunk and block size."""
    layer_groups, present, chunk_tokens, block = draw(stored(whole=draw(st.booleans())))
    num_chunks = len(present[0])
    for i in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(layer_groups)))
        layer_groups.insert(place, state_group(f"s{i}"))
        row = st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks)
        present.insert(place, draw(row))
    noise = draw(st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks))
    partly = [
        [a or (b and group.is_state) for a, b in zip(row, noise, strict=True)]
        for group, row in zip(layer_groups, present, strict=True)
    ]
    return layer_groups, present, partly, chunk_tokens, block


@given(stored_states())
def test_a_hit_has_a_state_of_every_layer_and_all_attention_before_it(
    case: tuple[list[LayerGroup], list[list[bool]], list[list[bool]], int, int],
) -> None:
    layer_groups, present, partly, chunk_tokens, block = case
    num_chunks = len(present[0])
    search = HitSearch(num_chunks, layer_groups, chunk_tokens, block)
    asked: set[Question] = set()
    while not search.done:
        questions = search.questions()
        assert questions
        assert not asked & set(questions)
        asked.update(questions)
        search.answer(
            questions, [(present if q.whole else partly)[q.layer_group][q.chunk] for q in questions]
        )
    assert search.questions() == ()
    states = [row for each, row in zip(layer_groups, present, strict=True) if each.is_state]
    attention = [
        (each, row) for each, row in zip(layer_groups, present, strict=True) if not each.is_state
    ]

    def is_whole(chunks: int) -> bool:
        end = chunks * chunk_tokens
        return (
            end % block == 0
            and all(row[chunks - 1] for row in states)
            and all(
                row[chunk]
                for each, row in attention
                for chunk in needed(each.window, chunk_tokens, block, end)
            )
        )

    assert search.found <= search.attention <= num_chunks
    assert search.found == 0 or is_whole(search.found)
    if any(each.window.is_full for each, _ in attention):  # others have gaps, by bisection
        whole = [chunks for chunks in range(1, num_chunks + 1) if is_whole(chunks)]
        assert search.found == max(whole, default=0)


def test_the_state_of_a_long_prompt_takes_few_rounds() -> None:
    layer_groups = [layer_group(), state_group()]
    for stored_at in ([599], [480], [1], [], [5, 300]):
        present = [[True] * MAX_CHUNKS, [chunk in stored_at for chunk in range(MAX_CHUNKS)]]
        found, rounds, _ = hit(present, layer_groups, 16, 16)
        assert found == max(stored_at, default=-1) + 1
        assert rounds <= 3 + -(-MAX_CHUNKS // SAMPLES)
    present = [[True] * 100, [chunk in (40, 70) for chunk in range(100)]]
    assert hit(present, layer_groups, 16, 16)[:2] == (71, 3)  # attention, samples, all cells


# Host memory of the ranks

CHUNKS = ["a", "b", "c", "d", "e"]


def change(added: str = "", removed: str = "") -> HostCacheChange:
    """Return a change of chunks, each named by its digit."""
    groups = [tuple(CHUNKS[int(digit)] for digit in digits) for digits in (added, removed)]
    return HostCacheChange(*groups)


def test_a_chunk_is_here_once_every_rank_has_it() -> None:
    mirror = HostCacheIndex(3)
    for rank in (0, 1, 1, 2):
        assert not mirror.has(CHUNKS[1])
        mirror.apply(rank, change("1"))
    assert mirror.has(CHUNKS[1])
    assert not mirror.has(CHUNKS[2])
    mirror.apply(1, change(removed="1"))
    assert not mirror.has(CHUNKS[1])
    mirror.apply(1, change("1"))
    assert mirror.has(CHUNKS[1])
    mirror.clear()
    assert not mirror.has(CHUNKS[1])


def test_removing_what_is_not_there_is_nothing() -> None:
    mirror = HostCacheIndex(2)
    mirror.apply(0, change("1"))
    mirror.apply(1, change(removed="1"))
    mirror.apply(0, change(removed="2"))
    mirror.apply(1, change("1"))
    assert mirror.has(CHUNKS[1])


def test_a_chunk_that_nobody_has_leaves_nothing_behind() -> None:
    mirror = HostCacheIndex(2)
    for rank in (0, 1):
        mirror.apply(rank, change("01234"))
        mirror.apply(rank, change(removed="01234"))
    assert mirror._ranks_of == {}


def test_without_host_memory_nothing_is_here() -> None:
    assert not HostCacheIndex(0).has(CHUNKS[1])


def test_window_of_a_hit_with_a_prompt_end_begins_at_its_last_token() -> None:
    """The last chunk has one token of four, so the window reaches into the second chunk."""
    groups = [layer_group("full"), layer_group("window", window=AttentionWindow(sliding=3))]
    search = HitSearch(3, groups, 4, 1, num_tokens=9)
    asked: set[Question] = set()
    while not search.done:
        questions = search.questions()
        asked.update(questions)
        search.answer(questions, [True] * len(questions))
    assert {each.chunk for each in asked if each.layer_group == 1} == {1, 2}
