"""Offers of producers to a consumer's rank, open and closed (pure; control thread)."""

from collections import OrderedDict
from collections.abc import Callable

from vllm_kvpool.embeds.machines.effects import Turn
from vllm_kvpool.embeds.machines.items import Item
from vllm_kvpool.embeds.machines.window import TransferRef
from vllm_kvpool.embeds.protocol.messages import MAX_ENDED, Message, Offer


class Offers:
    """The open offers by transfer; each also stands in its item's `offers`."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.open: dict[TransferRef, Item] = {}
        self._final_messages: OrderedDict[TransferRef, Message] = OrderedDict()

    def add(self, item: Item, ref: TransferRef, message: Offer) -> None:
        """Open an offer: the item's first one sends, later ones stand by."""
        item.offers[ref] = message
        self.open[ref] = item

    def remove(self, ref: TransferRef) -> None:
        """Remove an open offer without a word to its producer."""
        del self.open.pop(ref).offers[ref]

    def finish(self, ref: TransferRef, final_message: Message) -> None:
        """Send the final message of an offer, which answers whatever its producer asks later."""
        self._final_messages[ref] = final_message
        while len(self._final_messages) > MAX_ENDED:
            self._final_messages.popitem(last=False)
        self._turn.send(ref[0], final_message)

    def close(self, item: Item, final_message: Callable[[int], Message]) -> None:
        """Close all offers of an item; `final_message(tid)` tells each producer."""
        for ref in list(item.offers):
            self.remove(ref)
            self.finish(ref, final_message(ref[1]))

    def repeat_final(self, ref: TransferRef) -> bool:
        """Send an offer's final message again; False if the offer has not ended."""
        final_message = self._final_messages.get(ref)
        if final_message is not None:
            self._turn.send(ref[0], final_message)
        return final_message is not None

    def forget_finals(self, peer: str) -> None:
        """Forget the final messages to a lost peer."""
        for ref in [each for each in self._final_messages if each[0] == peer]:
            del self._final_messages[ref]
