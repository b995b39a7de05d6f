"""Availability of an item to a request, for every combination of inputs."""

from itertools import product

import pytest

from vllm_kvpool.embeds.availability import (
    MAX_CHOICES,
    Availability,
    Encodings,
    ItemRecord,
    Situation,
    availability,
)
from vllm_kvpool.embeds.protocol.messages import Code, Expect

RANKS = 2
FAILURE = Code.GONE, "for a reason"
HERE, OTHER = Expect("x", 0), Expect("x", 1)
RECORDS = [
    ItemRecord("x", "x", is_resident, dict(requests), Encodings(ready=set(ready)), failure)
    for is_resident, requests, ready, failure in product(
        (False, True),
        ({}, {"other": OTHER}, {"here": HERE}, {"other": OTHER, "here": HERE}),
        ((), (0,), (0, 1)),
        (None, FAILURE),
    )
    if requests or not (ready or failure)
]
SITUATIONS = [Situation(RANKS, *facts) for facts in product((False, True), repeat=5)]


@pytest.mark.parametrize("has_media", [False, True])
def test_availability_of_an_item_follows_its_record(has_media: bool) -> None:
    for item, now in product(RECORDS, SITUATIONS):
        found = availability(item, "here", has_media, now)
        is_kept = not (now.makes_room or now.may_have_evicted)
        is_safe = item.is_resident and (has_media or is_kept)
        if found is Availability.AVAILABLE:
            assert is_safe or item.is_ready(RANKS), "the engine would encode it or end"
            assert is_safe or "here" in item.requests, "the workers might forget it"
        if found is Availability.ENDANGERED:
            assert item.is_resident
            assert now.may_have_evicted
            assert not has_media
        if found is Availability.UNAVAILABLE:
            assert not is_safe
            assert item.failure or now.are_workers_lost or not now.may_arrive
        if found is Availability.UNREQUESTED:
            assert "here" not in item.requests
        if found is Availability.PENDING and now.are_workers_lost:
            assert item.is_resident, "lost workers bring nothing"


@pytest.mark.parametrize("has_media", [False, True])
def test_request_is_asked_for_once_at_most(has_media: bool) -> None:
    for item, now in product(RECORDS, SITUATIONS):
        if availability(item, "here", has_media, now) is Availability.UNREQUESTED:
            asked = ItemRecord("x", "x", item.is_resident, {**item.requests, "here": HERE})
            asked.encodings, asked.failure = item.encodings, item.failure
            found = availability(asked, "here", has_media, now)
            assert found is not Availability.UNREQUESTED


def test_encodings_that_differ_are_tried_one_after_the_other() -> None:
    encodings = Encodings()
    assert encodings.add(0, "a", is_ready=False) == ""
    assert encodings.add(1, "b", is_ready=True) == "b", "a rank has it whole"
    encodings.choose("b")
    assert not encodings.by_rank, "each rank reports again"
    assert encodings.add(0, "a", is_ready=True) == "", "sent before it knew"
    assert encodings.next_choice == "a"
    for _ in range(MAX_CHOICES):
        encodings.untried["c"] = None
        encodings.choose("a")
    assert encodings.next_choice == ""
