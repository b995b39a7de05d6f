"""Who offers a consumer which item, and what was last said to who does not any more (pure).

What is over is answered again with its last word, however often it is asked for; of so many.
"""

from collections import OrderedDict
from collections.abc import Callable

from vllm_kvpool.embeds.items import Item, Source
from vllm_kvpool.embeds.protocol import Message, Offer


class Sources:
    """See the module docstring. `say` takes a peer and a message."""

    def __init__(self, max_ended: int, say: Callable[[str, Message], None]) -> None:
        self._max_ended = max_ended
        self._say = say
        self._items: dict[Source, str] = {}
        self._ended: OrderedDict[Source, Message] = OrderedDict()

    def __contains__(self, source: Source) -> bool:
        return source in self._items

    def item_of(self, source: Source) -> str | None:
        """The item that is offered so."""
        return self._items.get(source)

    def add(self, item: Item, source: Source, told: Offer) -> None:
        """An item is offered, for the first time or by another one."""
        item.sources.append(source)
        item.offers[source] = told
        self._items[source] = item.mm_hash

    def drop(self, source: Source) -> str | None:
        """It is offered so no more; the item that was."""
        return self._items.pop(source, None)

    def close(self, source: Source, last_word: Message) -> None:
        """The same, and that is said."""
        self._items.pop(source, None)
        self._ended[source] = last_word
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        self._say(source[0], last_word)

    def repeat_end(self, source: Source) -> bool:
        """Say the last word again; False if there was none."""
        message = self._ended.get(source)
        if message is not None:
            self._say(source[0], message)
        return message is not None

    def of_peer(self, peer: str) -> list[Source]:
        """What it offers."""
        return [each for each in self._items if each[0] == peer]

    def forget_ends_of(self, peer: str) -> None:
        """It is gone, and asks no more."""
        for source in [each for each in self._ended if each[0] == peer]:
            del self._ended[source]

    def check(self, items: dict[str, Item]) -> None:
        """What always holds."""
        for source, mm_hash in self._items.items():
            assert source in items[mm_hash].sources
