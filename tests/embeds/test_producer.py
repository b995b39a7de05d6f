"""Peers that wait for items which are not encoded yet."""

from vllm_kvpool.embeds.machines.producer import PendingTargets


def filled(most: int = 8) -> PendingTargets:
    wants = PendingTargets(most)
    wants.add("cat", "a", 5.0)
    wants.add("dog", "a", 7.0)
    wants.add("cat", "b", 9.0)
    return wants


def test_all_who_wait_for_an_item_are_named_once() -> None:
    wants = filled()
    assert wants.items == {"cat", "dog"}
    assert wants.take("cat") == ["a", "b"]
    assert wants.take("cat") == wants.take("cow") == []
    assert (wants.items, len(wants)) == ({"dog"}, 1)


def test_a_wish_that_is_made_again_counts_once_and_waits_longer() -> None:
    wants = filled()
    wants.add("cat", "a", 20.0)
    wants.drop_late(10.0)
    assert len(wants) == 1
    assert wants.take("cat") == ["a"]


def test_a_peer_that_is_lost_waits_for_nothing() -> None:
    wants = filled()
    wants.drop("a")
    assert (wants.take("cat"), wants.take("dog"), len(wants)) == (["b"], [], 0)


def test_a_wish_is_good_until_its_end() -> None:
    wants = filled()
    wants.drop_late(7.0)
    assert (wants.take("cat"), wants.take("dog")) == (["b"], ["a"])


def test_beyond_the_bound_the_oldest_wish_is_forgotten() -> None:
    wants = filled(most=3)
    wants.add("cow", "a", 1.0)
    assert (wants.items, len(wants)) == ({"cat", "dog", "cow"}, 3)
    assert wants.take("cat") == ["b"]
