"""What is left in host memory of prompts with common beginnings: never an end without its head."""

from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.engine_bench import DISK, Bench
from vllm_kvpool.storage.eviction import POLICIES

PROMPTS = ("a b c d", "a b e f", "a g h", "w x y z")
LONGEST = 4
PARENTS = {
    chunk: parent
    for prompt in PROMPTS
    for parent, chunk in zip(prompt.split(), prompt.split()[1:], strict=False)
}

requests = st.tuples(
    st.sampled_from(["load", "save", "prefetch"]),
    st.sampled_from(PROMPTS),
    st.integers(1, LONGEST),
    st.sampled_from([0.0, 1.0, 100.0, 2000.0]),
)


@given(
    st.lists(requests, max_size=20),
    st.sampled_from(sorted(POLICIES)),
    st.integers(LONGEST, 10),
)
def test_whenever_a_chunk_is_in_host_memory_so_are_those_before_it(
    asked: list[tuple[str, str, int, float]], policy: str, keep: int
) -> None:
    bench = Bench(DISK, slots=keep + 8, keep=keep, policy=policy)
    for job, (kind, prompt, length, pause_s) in enumerate(asked):
        cells = " ".join(prompt.split()[:length])
        {"load": bench.load, "save": bench.save, "prefetch": bench.prefetch}[kind](job, cells)
        bench.run()
        here = {entry.key for entry in bench.host_cache}
        assert all(PARENTS.get(chunk, chunk) in here for chunk in here), here
        bench.after(pause_s)
        bench.run()
