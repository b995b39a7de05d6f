"""`kvpool pin` and `kvpool purge`: protect stored prompts from eviction, and remove cells."""

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.keys import chunk_id_of_key, hash_of_key
from vllm_kvpool.storage.base import Store
from vllm_kvpool.storage.file.store import DirectoryReader

REMOVE_KEYS = 512  # of a call

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
MAX_DURATION_S = 36_500 * 86_400
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


class StoreAnswer(msgspec.Struct, frozen=True, rename={"url": "store", "num": "count"}):
    """Answer of one store; `num` is None if the store cannot do it."""

    url: str
    num: int | None
    text: str


def parse_duration_s(text: str) -> float:
    """Return the seconds of "90s", "30m", "12h", "7d" or "2w"; ConfigError for another text."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text[:40]!r} is no duration; write one like 90s, 30m, 12h, 7d or 2w")
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if seconds > MAX_DURATION_S:
        days = MAX_DURATION_S // 86_400
        raise ConfigError(f"{text[:40]!r} is too long: the limit is {days}d (100 years)")
    return seconds


def pin(stores: Sequence[NamedStore], keys: Sequence[str], seconds: float) -> list[StoreAnswer]:
    """Pin the stored chunks of a prompt; 0 seconds end their pins."""
    until_ns = time.time_ns() + int(seconds * 1e9) if seconds else 0
    done = "pinned" if seconds else "unpinned"
    answers = []
    for url, store in ((each.url, each.store) for each in stores):
        if store.capabilities.pins:
            stored = {chunk_id_of_key(key) for key in _stored(store, keys)} if seconds else set()
            count = store.pin(keys, until_ns)
            text = f"{count} chunks {done}"
            if (more := len(stored) - count) > 0:
                text += f", {more} that are stored were not: pins take at most half of size="
            answers.append(StoreAnswer(url, count, text))
        else:
            answers.append(StoreAnswer(url, None, _no_pins(url)))
    return answers


def _stored(store: Store, keys: Sequence[str]) -> Iterator[str]:
    return itertools.compress(keys, store.exists(keys))


def _no_pins(url: str) -> str:
    match url.partition("://")[0]:
        case "mooncake":
            return "cannot pin what is stored"
        case "s3":
            return "evicts nothing, so there is nothing to pin; the bucket's lifecycle rules decide"
        case _:
            return "cannot pin"


def remove_prompt(
    stores: Sequence[NamedStore], namespace: str, keys: Sequence[str]
) -> list[StoreAnswer]:
    """Remove these cells of a prompt; from directories all cells of their chunks.

    Other stores cannot find cells whose names the namespace's manifest does not tell: of drafters,
    and of engines with another `layer_span`.
    """
    hashes = set(map(hash_of_key, keys))

    def remove_found(store: Store) -> int:
        count = _remove(store, keys)
        if isinstance(store, DirectoryReader):
            count += _remove(store, store.keys_of_chunks(namespace, hashes))
        return count

    return [_removed(each, remove_found) for each in stores]


def remove_older(
    stores: Sequence[NamedStore], namespaces: Sequence[str], seconds: float
) -> list[StoreAnswer]:
    """Remove the cells of namespaces that were written longer ago."""
    before_ns = time.time_ns() - int(seconds * 1e9)

    def remove_found(store: Store) -> int | str:
        if not isinstance(store, DirectoryReader):
            return "cannot say when cells were written"
        found = (store.keys_written_before(name, before_ns) for name in namespaces)
        return sum(_remove(store, keys) for keys in found)

    return [_removed(each, remove_found) for each in stores]


def remove_tenant(
    stores: Sequence[NamedStore], namespaces: Sequence[str], tenant: str
) -> list[StoreAnswer]:
    """Remove the cells of namespaces that are a tenant's, as `tenant_of` names that of a salt."""

    def remove_found(store: Store) -> int | str:
        if not isinstance(store, DirectoryReader) or not store.owners():
            return "does not know whose cells it has (file:// does with shares=tenant)"
        found = (store.keys_of_owner(name, tenant) for name in namespaces)
        return sum(_remove(store, keys) for keys in found)

    return [_removed(each, remove_found) for each in stores]


def remove_namespaces(stores: Sequence[NamedStore], namespaces: Sequence[str]) -> list[StoreAnswer]:
    """Remove all cells of namespaces."""
    return [
        _removed(each, lambda store: sum(map(store.remove_namespace, namespaces)))
        for each in stores
    ]


def _remove(store: Store, keys: Iterable[str]) -> int:
    count, rest = 0, iter(keys)
    while part := list(itertools.islice(rest, REMOVE_KEYS)):
        count += store.remove(part)
    return count


def _removed(named: NamedStore, remove: Callable[[Store], int | str]) -> StoreAnswer:
    """Return the answer of a store: how much `remove` has removed, or why it has not."""
    is_writable = named.store.capabilities.writable
    try:
        done = remove(named.store) if is_writable else "may not be written by this user"
    except StoreError as error:  # other stores are asked all the same
        return StoreAnswer(named.url, None, f"{error}; not all is removed")
    if isinstance(done, str):
        return StoreAnswer(named.url, None, f"{done}; nothing removed")
    return StoreAnswer(named.url, done, f"{done} objects removed")


def as_text(answers: Sequence[StoreAnswer]) -> str:
    """Return the answers in words, a line each."""
    return "\n".join(f"{each.url}: {each.text}" for each in answers)
