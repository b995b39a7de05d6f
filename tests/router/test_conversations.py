"""Chats of several turns: how many turns come back to the decoder that has their KV."""

import random
from collections import Counter
from itertools import count, pairwise

import pytest

from tests.support.router_engines import engine_spec
from tests.support.router_world import World
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import Action, Decode, Event
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import ReplicaId, Role

DECODERS, CHATS, TURNS = 4, 24, 8
SPANS_A_TURN, TOKENS_A_SPAN, OUTPUT_TOKENS = 4, 256, 100
KIND = engine_spec(step_base_s=0.01, decode_sequence_s=0.0005, kv_blocks=40_000)


class Recorder(Controller):
    """Remembers where requests were decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[RequestId, ReplicaId] = {}

    def step(self, event: Event, now: float) -> list[Action]:
        actions = super().step(event, now)
        self.places |= {a.request_id: a.replica for a in actions if isinstance(a, Decode)}
        return actions


def chat_for(world: World, chats: int, num_turns: int, shared: int = 0) -> list[list[RequestId]]:
    """Each chat asks again some seconds after its answer. `shared`: spans that all begin with."""
    chance, numbers = random.Random(3), count()
    asked: list[list[RequestId]] = [[] for _ in range(chats)]

    def ask(chat: int) -> None:
        turns = asked[chat]
        request_id = RequestId(f"c{chat}-{len(turns)}")
        spans = shared + SPANS_A_TURN * (len(turns) + 1)
        turns.append(request_id)
        prefix = [at if at < shared else (chat + 1) * 1000 + at for at in range(spans)]
        made = RequestSpec(
            request_id=request_id,
            prompt_tokens=spans * TOKENS_A_SPAN + 10,
            max_output_tokens=OUTPUT_TOKENS,
            prefix=tuple(prefix),
            prefix_tokens=TOKENS_A_SPAN,
        )
        client = world.arrive(made, OUTPUT_TOKENS)

        def look() -> None:
            if not client.fate:
                world.timeline.after(0.2, look)
            elif len(turns) < num_turns:
                world.timeline.after(chance.uniform(0.5, 4.0), lambda: ask(chat))

        look()

    for _ in range(chats):
        chat = next(numbers)
        world.timeline.after(chance.uniform(0.0, 5.0), lambda chat=chat: ask(chat))
    world.run(300.0)
    return asked


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_turns_of_a_chat_come_back_to_the_decoder_that_has_them(num_prefill: int) -> None:
    controller = Recorder()
    world = World(controller, kind=KIND)
    for number in range(num_prefill):
        world.add(f"p{number}", Role.PREFILL)
    for number in range(DECODERS):
        world.add(f"d{number}", Role.DECODE)
    world.run(2.0)
    chats = chat_for(world, CHATS, TURNS)
    assert world.calls.fates["served"] == CHATS * TURNS
    places = [[controller.places[each] for each in chat] for chat in chats]
    returned = sum(a == b for chat in places for a, b in pairwise(chat))
    assert returned / (CHATS * (TURNS - 1)) >= 0.9  # by chance it would be a quarter
    shares = Counter(place for chat in places for place in chat)
    assert max(shares.values()) <= 2 * min(shares[ReplicaId(f"d{n}")] for n in range(DECODERS))


def test_what_all_prompts_begin_with_does_not_draw_all_to_one_decoder() -> None:
    controller = Recorder()
    world = World(controller, kind=KIND)
    for number in range(DECODERS):
        world.add(f"d{number}", Role.DECODE)
    world.run(2.0)
    chats = chat_for(world, 60, 1, shared=16)
    shares = Counter(controller.places[each] for chat in chats for each in chat)
    assert len(shares) == DECODERS
    assert max(shares.values()) <= 30
