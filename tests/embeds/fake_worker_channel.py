"""A scheduler's channel to workers that a test plays."""

from collections import deque
from typing import NamedTuple

import msgspec

from vllm_kvpool.embeds.protocol.messages import (
    Code,
    Expect,
    Forget,
    ItemNews,
    Message,
    Requested,
)


class WorkerMessage(NamedTuple):
    rank: int
    body: Message | None


class FakeWorkerChannel:
    """`heard` is what each rank was told and `words` what is to be heard of them."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.are_up = True
        self.silent_s = 0.0
        self.heard: list[list[Message]] = [[] for _ in range(num_ranks)]
        self.words: deque[WorkerMessage] = deque()
        self.wait_ids: list[dict[str, int]] = [{} for _ in range(num_ranks)]  # as workers know them
        self.waits: list[float] = []
        self.unsaid = 0  # messages that may still wait for the end of the step
        self.is_closed = False

    def send(self, body: Message, rank: int | None = None) -> None:
        self.unsaid += 1
        for number, heard in enumerate(self.heard):
            if self.are_up and rank in (None, number):
                heard.append(body)
                if isinstance(body, Expect):
                    self.wait_ids[number][body.mm_hash] = body.wait_id
                elif isinstance(body, Forget):
                    self.wait_ids[number].pop(body.mm_hash, None)

    def flush(self) -> None:
        self.unsaid = 0

    def poll(self, timeout_s: float = 0.0) -> list[WorkerMessage]:
        self.waits.append(timeout_s)
        words = list(self.words)
        self.words.clear()
        return words

    def close(self) -> None:
        self.is_closed = True

    # What a test lets happen

    def say(self, body: Message | None, *ranks: int) -> None:
        """Queue a message from these ranks, or from every rank if none is named.

        News answer the last `Expect` that a rank has received.
        """
        for rank in ranks or range(self.num_ranks):
            said = body
            if isinstance(body, ItemNews):
                wait_id = self.wait_ids[rank].get(body.mm_hash, 0)
                said = msgspec.structs.replace(body, wait_id=wait_id)
            self.words.append(WorkerMessage(rank, said))

    def ready(self, mm_hash: str, *ranks: int, digest: str = "d", weights_version: int = 0) -> None:
        """An item is there."""
        self.say(ItemNews(mm_hash, digest, weights_version=weights_version), *ranks)

    def coming(self, mm_hash: str, *ranks: int, digest: str) -> None:
        """An item is on its way to these ranks, in this encoding."""
        self.say(ItemNews(mm_hash, digest, offered=True), *ranks)

    def failed(
        self, mm_hash: str, *ranks: int, code: Code = Code.GONE, weights_version: int = 0
    ) -> None:
        """An item cannot be had."""
        self.say(
            ItemNews(mm_hash, code=code, text="for a reason", weights_version=weights_version),
            *ranks,
        )

    def taken(self, mm_hash: str) -> None:
        """The engine has loaded an item: the workers do not have it any more."""
        for heard in self.heard:
            heard.append(Forget(mm_hash))

    def expected(self, rank: int = 0) -> list[str]:
        """Items that a rank is still to bring, in the order in which it was told."""
        names: dict[str, None] = {}
        for body in self.heard[rank]:
            if isinstance(body, Expect):
                names[body.mm_hash] = None
            elif isinstance(body, Forget):
                names.pop(body.mm_hash, None)
            elif isinstance(body, Requested):
                names = {name: None for name in names if name in body.names}
        return list(names)

    def take(self, kind: type[Message], rank: int = 0) -> list[Message]:  # type: ignore[valid-type]
        """Return and drop the messages of one type that a rank has received."""
        found = [body for body in self.heard[rank] if isinstance(body, kind)]
        self.heard[rank] = [body for body in self.heard[rank] if not isinstance(body, kind)]
        return found
