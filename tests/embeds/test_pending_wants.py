"""Wishes for items that are not here: who is told, who is forgotten."""

from vllm_kvpool.embeds.machines.producer import PendingWants


def filled(most: int = 8) -> PendingWants:
    wishes = PendingWants(most)
    wishes.add("cat", "a", 5.0)
    wishes.add("dog", "a", 7.0)
    wishes.add("cat", "b", 9.0)
    return wishes


def test_all_who_wait_for_an_item_are_named_once() -> None:
    wishes = filled()
    assert wishes.items == {"cat", "dog"}
    assert wishes.take("cat") == ["a", "b"]
    assert wishes.take("cat") == wishes.take("cow") == []
    assert (wishes.items, len(wishes)) == ({"dog"}, 1)


def test_a_wish_that_is_made_again_counts_once_and_waits_longer() -> None:
    wishes = filled()
    wishes.add("cat", "a", 20.0)
    wishes.drop_late(10.0)
    assert len(wishes) == 1
    assert wishes.take("cat") == ["a"]


def test_a_peer_that_is_lost_waits_for_nothing() -> None:
    wishes = filled()
    wishes.drop_peer("a")
    assert (wishes.take("cat"), wishes.take("dog"), len(wishes)) == (["b"], [], 0)


def test_a_wish_is_good_until_its_end() -> None:
    wishes = filled()
    wishes.drop_late(7.0)
    assert (wishes.take("cat"), wishes.take("dog")) == (["b"], ["a"])


def test_beyond_the_bound_the_oldest_wish_is_forgotten() -> None:
    wishes = filled(most=3)
    wishes.add("cow", "a", 1.0)
    assert (wishes.items, len(wishes)) == ({"cat", "dog", "cow"}, 3)
    assert wishes.take("cat") == ["b"]
