"""Decode's view of hand-overs: which prompts it waits for, and how far all ranks have stored them.

Pure; the thread of `consumer.NoticeClient` owns it. A topic is watched at groups of endpoints: a
group is the ranks of one engine. A chunk is stored once all ranks of a group have stored it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_kvpool.handover.messages import Message, Notice, Unwatch, Watch


class SendTo(NamedTuple):
    """Send a message to an endpoint, if there is a connection to it."""

    endpoint: str
    message: Message


class Progress(NamedTuple):
    """Progress over all ranks: chunks before `stored` are stored, none comes from `ended` on."""

    topic: bytes
    stored: int
    ended: int | None


class Lost(NamedTuple):
    """No engine is left that could store more of the topic's prompt."""

    topic: bytes


Action = SendTo | Progress | Lost
Group = tuple[str, ...]


@dataclass(slots=True)
class _Topic:
    num_watches: int = 0
    groups: dict[Group, None] = field(default_factory=dict)  # without those that are lost
    at: set[str] = field(default_factory=set)  # endpoints where it is watched
    said: dict[str, Notice] = field(default_factory=dict)  # by endpoint, the newest
    told: tuple[int, int | None] | None = None  # what is stored stays so

    def merged(self) -> tuple[int, int | None] | None:
        """Return the chunks stored, and where they end, over all groups: the best of them counts.

        None as long as there is nothing stored, no end, and no group whose ranks have all answered.
        """
        (stored, _), ends = self.told or (0, None), []
        for group in self.groups:
            said = [self.said.get(endpoint) for endpoint in group]
            ranks = [0 if each is None else each.stored for each in said]
            ended = [each.ended for each in said if each is not None and each.ended is not None]
            stored = max(stored, min(ranks))
            ends.append(min(ended, default=None))
        known = [end for end in ends if end is not None]
        merged = stored, max(known) if known and len(known) == len(ends) else None
        have_answered = any(self.said.keys() >= set(group) for group in self.groups)
        return merged if self.told or have_answered or merged != (0, None) else None


class Watches:
    """The topics that this engine waits for."""

    def __init__(self) -> None:
        self._topics: dict[bytes, _Topic] = {}
        self._at: dict[str, dict[bytes, None]] = {}  # endpoint -> topics watched there

    def topics_at(self, endpoint: str) -> Iterable[bytes]:
        """Return the topics that are watched at an endpoint."""
        return self._at.get(endpoint, ())

    def watch(self, endpoints: Iterable[str], topic: bytes) -> list[Action]:
        """Add a request that waits for a prompt, computed by the engine at these endpoints."""
        state = self._topics.setdefault(topic, _Topic())
        state.num_watches += 1
        group = tuple(dict.fromkeys(endpoints))
        if group:
            state.groups[group] = None
        sends = self._send_changes(topic, state)
        return [*sends, *self._progress(topic, state, is_new=True)]

    def unwatch(self, topic: bytes) -> list[Action]:
        """Remove a request that waits for the prompt."""
        state = self._topics.get(topic)
        if state is None:
            return []
        state.num_watches -= 1
        if state.num_watches:
            return []
        state.groups.clear()
        sends = self._send_changes(topic, state)
        del self._topics[topic]
        return [*sends]

    def notice(self, endpoint: str, notice: Notice) -> list[Action] | None:
        """Take a rank's notice; None if nobody waits for it from there."""
        topic = notice.topic
        if topic not in self._at.get(endpoint, ()):
            return None
        state = self._topics[topic]
        before = state.said.get(endpoint)
        stored = max(notice.stored, 0 if before is None else before.stored)
        ended = None if notice.ended is None else max(notice.ended, stored)
        state.said[endpoint] = Notice(topic, stored, ended)
        return self._progress(topic, state)

    def lost(self, endpoint: str) -> list[Action]:
        """End the watches of a process that is gone: its engine stores nothing more."""
        actions: list[Action] = []
        for topic in list(self.topics_at(endpoint)):
            state = self._topics[topic]
            state.groups = {group: None for group in state.groups if endpoint not in group}
            sends = self._send_changes(topic, state)
            actions += [each for each in sends if each.endpoint != endpoint]
            actions += self._progress(topic, state) if state.groups else [Lost(topic)]
        return actions

    def connected(self, endpoint: str) -> list[Action]:
        """Watch anew what is waited for at an endpoint that is connected again."""
        return [SendTo(endpoint, Watch(topic)) for topic in self.topics_at(endpoint)]

    def _send_changes(self, topic: bytes, state: _Topic) -> list[SendTo]:
        """Watch where the topic's groups are now, and nowhere else."""
        before, wanted = state.at, {endpoint for group in state.groups for endpoint in group}
        state.at = wanted
        for endpoint in before - wanted:
            del self._at[endpoint][topic]
            state.said.pop(endpoint, None)
            if not self._at[endpoint]:
                del self._at[endpoint]
        for endpoint in wanted - before:
            self._at.setdefault(endpoint, {})[topic] = None
        return [
            *(SendTo(endpoint, Unwatch(topic)) for endpoint in sorted(before - wanted)),
            *(SendTo(endpoint, Watch(topic)) for endpoint in sorted(wanted - before)),
        ]

    def _progress(self, topic: bytes, state: _Topic, *, is_new: bool = False) -> list[Action]:
        """Return the changed progress; for a new request all that is known."""
        known, state.told = (None if is_new else state.told), state.merged()
        return [] if state.told in (None, known) else [Progress(topic, *state.told)]
