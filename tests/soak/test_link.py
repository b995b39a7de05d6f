"""Two hosts, a store on one of them, and a link between that is cut, late or loses frames.

The near host has the store and the writing engine, the far host the reading engine. Every request
must end within its time limit, and all KV it keeps must be right; `Crew` checks both. Hits must
come back after the link does.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.crew import START_LIMIT_S, Crew, Member
from tests.soak.engine import CALL_TIMEOUT_S, EngineSpec
from tests.soak.link import NEAR_ADDRESS, Link, NearObjects
from tests.soak.rounds import RECOVER_LIMIT_S, SURVIVE_LIMIT_S, Prompts
from tests.soak.wire import Weather
from tests.support.namespaces import HostMaster, Inside, entered_or_skipped
from vllm_kvpool.config import KVRole

GOOD = Weather()
SLOW = Weather(delay_s=0.02)  # makes it likely that loads are under way
LATE = Weather(delay_s=0.08)
LOSSY = Weather(delay_s=0.005, loss=0.03)
SHORT_S, LONG_S = 0.5, 2 * CALL_TIMEOUT_S
CREDENTIALS = (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"))

FEW_PROMPTS = 3  # the object server takes 10 ms a request

Choose = Callable[[Member], tuple[int, ...]]
StartCrew = Callable[[EngineSpec, EngineSpec, Choose], Crew]

pytestmark = [pytest.mark.slow, pytest.mark.soak]


@pytest.fixture
def seed() -> int:
    """Return and print the seed of fault times and lost frames; a failing test shows it."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def link(seed: int) -> Iterator[Link]:
    with entered_or_skipped(Link(seed)) as link:
        yield link


@pytest.fixture
def start_crew(link: Link, tmp_path: Path) -> Iterator[StartCrew]:
    """Start both engines, the writer near and the reader far, and wait for hits."""
    with ExitStack() as stack:

        def start(writer: EngineSpec, reader: EngineSpec, choose: Choose) -> Crew:
            crew = Crew(tmp_path, choose)
            stack.callback(crew.close)
            crew.start("writer", writer, link.near)
            crew.start("reader", reader, link.far)
            members = crew.members.values()
            crew.work(lambda: all(m.started for m in members), START_LIMIT_S, "both have started")
            wait_for_hits(crew)
            return crew

        yield start


@pytest.fixture
def mooncake(link: Link, start_crew: StartCrew, seed: int) -> Iterator[Crew]:
    """The writer's memory is the store."""
    master = HostMaster(NEAR_ADDRESS)
    with Inside(link.near) as near, near.running(master):
        url = f"mooncake://{master.address}"
        yield start_crew(
            EngineSpec((f"{url}?segment=256MiB",), 1, 16),
            EngineSpec((f"{url}?segment=0",), 2, 64, KVRole.CONSUMER),
            Prompts(random.Random(seed)).choose,
        )


@pytest.fixture
def objects(link: Link, start_crew: StartCrew, seed: int) -> Iterator[Crew]:
    server = NearObjects()
    with Inside(link.near) as near, near.running(server):
        near.call(lambda: server.make_bucket("soak"))
        url = f"s3://soak/cells?endpoint={server.endpoint}&allow_http=1"
        writer = EngineSpec((url,), 1, 16, lookup_timeout_s=2.0, environment=CREDENTIALS)
        chance = random.Random(seed)
        yield start_crew(
            writer,
            replace(writer, tp_size=2, block_size=64, role=KVRole.CONSUMER),
            lambda member: (chance.randrange(FEW_PROMPTS),),
        )


def wait_for_hits(crew: Crew) -> None:
    before = {name: member.hit_tokens for name, member in crew.members.items()}
    crew.work(
        lambda: all(m.hit_tokens > before[name] for name, m in crew.members.items()),
        RECOVER_LIMIT_S,
        "hits of both engines",
    )


def wait_for_answers(crew: Crew, count: int) -> None:
    def answered(member: Member) -> bool:
        return member.num_answers >= goals[member.name]

    goals = {name: member.num_answers + count for name, member in crew.members.items()}
    crew.work(lambda: all(map(answered, crew.members.values())), SURVIVE_LIMIT_S, "answers")


def cut_and_join(link: Link, crew: Crew, cut_s: float, seed: int) -> None:
    """In the middle of work; nothing arrives, and nobody is told."""
    chance = random.Random(seed)
    for _ in range(2):
        link.set(SLOW)
        crew.work_for(chance.uniform(0.2, 1.0))
        link.set(Weather(is_cut=True))
        crew.work_for(cut_s)
        link.set(GOOD)
        wait_for_answers(crew, 2)
        wait_for_hits(crew)
    crew.rest()
    print(dict(crew.totals), crew.slowest)


def take_down_and_up(link: Link, crew: Crew) -> None:
    """The far host's kernel knows, and tells its processes."""
    link.set(SLOW)
    crew.work_for(0.5)
    link.down()
    crew.work_for(LONG_S)
    link.up()
    link.set(GOOD)
    wait_for_answers(crew, 2)
    wait_for_hits(crew)


def go_through(link: Link, crew: Crew, weather: Weather) -> None:
    """Some hits come through bad weather, all of them after it."""
    link.set(weather)
    wait_for_answers(crew, 3)
    link.set(GOOD)
    wait_for_hits(crew)
    crew.rest()
    print(dict(crew.totals), crew.slowest)


@pytest.mark.mooncake
@pytest.mark.parametrize("cut_s", [SHORT_S, LONG_S])
def test_mooncake_over_a_link_that_is_cut(
    link: Link, mooncake: Crew, cut_s: float, seed: int
) -> None:
    cut_and_join(link, mooncake, cut_s, seed)


@pytest.mark.mooncake
def test_mooncake_over_a_link_that_goes_down(link: Link, mooncake: Crew) -> None:
    take_down_and_up(link, mooncake)


@pytest.mark.mooncake
@pytest.mark.parametrize("weather", [LATE, LOSSY], ids=["late", "lossy"])
def test_mooncake_over_a_bad_link(link: Link, mooncake: Crew, weather: Weather) -> None:
    go_through(link, mooncake, weather)


@pytest.mark.s3
def test_object_storage_over_a_link_that_is_cut(link: Link, objects: Crew, seed: int) -> None:
    cut_and_join(link, objects, LONG_S, seed)


@pytest.mark.s3
def test_object_storage_over_a_lossy_link(link: Link, objects: Crew) -> None:
    go_through(link, objects, LOSSY)
