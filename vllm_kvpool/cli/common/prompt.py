"""`kvpool explain` of a prompt: what stores hold of it, chunk by chunk."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Annotated

import msgspec

from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import alias_prefix
from vllm_kvpool.layout.description import from_description
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.prefetch import PromptCells
from vllm_kvpool.scheduler.prefix_search import CellNames, HitSearch
from vllm_kvpool.storage.contents.alias import alias_step
from vllm_kvpool.storage.contents.manifest import Manifest

MOST_NAMED = 4  # missing cells of a chunk


class ChunkPresence(msgspec.Struct, frozen=True, rename={"num_cells": "cells"}):
    """The cells of one chunk in one layer group: how many there are, and which are missing."""

    chunk: int
    kind: str
    num_cells: int
    missing: tuple[str, ...]


class PromptPresence(msgspec.Struct, frozen=True, rename={"num_tokens": "tokens"}):
    """A prompt in the namespace of one manifest: its chunks, over all stores together."""

    namespace: str
    num_tokens: int
    chunk_tokens: int
    usable_tokens: int
    """Tokens of the beginning that an engine can load: some layers need its last chunks alone."""
    usable_tokens_without_salt: int
    """Usable tokens of the same prompt without a salt, if none is usable with the given salt."""
    cells_by_store: dict[str, int]
    """By the URL of a store, how many cells of the prompt it has."""
    states_after_tokens: dict[str, tuple[int, ...]]
    """By layer group of recurrent states, the tokens after which its states are stored."""
    chunks: tuple[ChunkPresence, ...]


def read_tokens(text: str) -> list[int]:
    """Return a prompt's token ids from JSON; ConfigError if it is no list of them."""
    try:
        return msgspec.json.decode(text, type=list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
    except UNREADABLE as error:
        raise ConfigError(f"--tokens: expected a JSON list of token ids: {error}") from None


@dataclass(frozen=True, slots=True)
class PromptNames:
    """Names of the cells of a prompt without media or adapter."""

    tokens: Sequence[int]
    chain: ChunkChain
    cell_names: CellNames

    def keys(self) -> list[str]:
        """Return the keys of all cells, chunk by chunk."""
        return self._keys_of(self.chain.hashes)

    def end_keys(self) -> list[str]:
        """Return the keys that the prompt's end may have, a chunk of fewer tokens."""
        end = self.chain.end(self.tokens)
        return [] if end is None else self._keys_of([end])

    def _keys_of(self, hashes: Sequence[bytes]) -> list[str]:
        names = self.cell_names
        groups = range(len(names.layer_groups))
        return [key for h in hashes for group in groups for key in names.of_chunk(h, group)]

    def alias_keys(self) -> Iterator[str]:
        """Yield the keys that aliases of the prompt may have, whatever an engine's step is."""
        size, prefix = self.chain.chunk_tokens, alias_prefix(self.cell_names.namespace)
        least = alias_step(1, size) or size
        for index in range(-(-len(self.tokens) // size)):
            tokens = self.tokens[index * size : (index + 1) * size]
            for stop in range(least, min(len(tokens), size - 1) + 1):
                yield prefix + self.chain.hash_of_part(index, tokens[:stop]).hex()

    def cells(self) -> PromptCells:
        """Return the names for `kvpool prefetch`, with the cells' sizes."""
        names = self.cell_names
        return PromptCells(
            names.key_prefixes(self.chain.chunk_tokens),
            tuple(each.hex() for each in self.chain.hashes),
            all(each.is_state for each in names.layer_groups),
        )

    def covered_tokens(self, exists: Callable[[Sequence[str]], Sequence[bool]]) -> int:
        """Return the tokens that an engine's search would find, if its blocks fit into chunks."""
        names, hashes, size = self.cell_names, self.chain.hashes, self.chain.chunk_tokens
        search = HitSearch(len(hashes), names.layer_groups, size, block=1)
        while questions := search.questions():
            keys, ends = names.of_questions(questions, hashes)
            there = exists(keys)
            search.answer(questions, [all(there[a:b]) for a, b in pairwise((0, *ends))])
        return search.found * size


def names_of(manifest: Manifest, tokens: Sequence[int], cache_salt: str = "") -> PromptNames:
    """Return the names in the namespace of a manifest; ConfigError if that does not say."""
    chunk_tokens = manifest.chunk_tokens
    try:
        layer_groups = from_description(manifest.cells)
    except ValueError:  # heads, ranks and stages that do not fit together
        layer_groups = []
    if not layer_groups or not chunk_tokens:
        raise ConfigError(f"the manifest of {manifest.namespace} does not name its cells")
    chain = ChunkChain(chunk_tokens, RequestIdentity(cache_salt=cache_salt))
    chain.extend(list(tokens))
    return PromptNames(tokens, chain, CellNames(manifest.namespace, layer_groups))


def presence(
    stores: Sequence[NamedStore], manifest: Manifest, tokens: Sequence[int], cache_salt: str = ""
) -> PromptPresence:
    """Ask the stores for all cells of a prompt without media or adapter."""
    names = names_of(manifest, tokens, cache_salt)
    there: set[str] = set()
    found: dict[str, int] = {}
    keys = names.keys()
    for each in stores:
        held = {key for key, has in zip(keys, each.store.exists(keys), strict=True) if has}
        found[each.url] = len(held)
        there |= held
    chunks: list[ChunkPresence] = []
    states: dict[str, tuple[int, ...]] = {}
    for chunk, chunk_hash in enumerate(names.chain.hashes):
        for group, layer_group in enumerate(names.cell_names.layer_groups):
            cells = names.cell_names.of_chunk(chunk_hash, group)
            missing = tuple(key for key in cells if key not in there)
            if not layer_group.is_state:
                chunks.append(ChunkPresence(chunk, layer_group.name, len(cells), missing))
                continue
            boundary = () if missing else ((chunk + 1) * manifest.chunk_tokens,)
            states[layer_group.name] = states.get(layer_group.name, ()) + boundary
    usable = names.covered_tokens(lambda keys: [key in there for key in keys])
    without_salt = 0
    if cache_salt and not usable:
        without_salt = presence(stores, manifest, tokens).usable_tokens
    return PromptPresence(
        manifest.namespace,
        len(tokens),
        manifest.chunk_tokens,
        usable,
        without_salt,
        found,
        states,
        tuple(chunks),
    )


def as_text(found: PromptPresence) -> str:
    """Return a prompt in words: what is missing, a line for neighbours of which the same is."""
    num_chunks = found.num_tokens // found.chunk_tokens
    lines = [
        f"{found.namespace}",
        f"{found.num_tokens} tokens are {num_chunks} whole chunks of {found.chunk_tokens}",
        *(f"{url}: {count} cells of it" for url, count in found.cells_by_store.items()),
    ]
    if not num_chunks:
        lines.append("shorter than a chunk: stored and found with alias_tokens alone")
        return "\n".join(lines)
    lines.append(f"an engine can load the first {found.usable_tokens} tokens in whole chunks")
    if salted := found.usable_tokens_without_salt:
        lines.append(f"without --cache-salt the first {salted} are stored")
    elif not any(found.cells_by_store.values()):
        lines.append(
            "nothing of it is stored in this namespace: no engine has saved it, it was evicted, or "
            f"its first {found.chunk_tokens} tokens differ from what was saved (another chat "
            "template, a date in the system prompt), or the salt or adapter of its request does, "
            "or layer_span of the engine that saved it"
        )
    for kind, boundaries in found.states_after_tokens.items():
        after = f"after {', '.join(map(str, boundaries))} tokens" if boundaries else "nowhere"
        lines.append(f"recurrent states of {kind} are stored {after}; a load ends at one of them")
    lines += _missing(found)
    if found.usable_tokens == num_chunks * found.chunk_tokens:
        lines.append("all whole chunks are there; the last tokens of a prompt are always computed")
    return "\n".join(lines)


def _missing(found: PromptPresence) -> Iterator[str]:
    by_kind = sorted(found.chunks, key=lambda each: each.kind)
    for (kind, absent), run in groupby(by_kind, lambda each: (each.kind, _absent(each, found))):
        if absent:
            chunks = [each.chunk for each in run]
            several = f"chunks {chunks[0]} to {chunks[-1]}"
            which = several if len(chunks) > 1 else f"chunk {chunks[0]}"
            yield f"  {which}{f' of {kind}' if kind else ''}: {absent}"


def _absent(chunk: ChunkPresence, found: PromptPresence) -> str:
    """Return the missing parts of a chunk in words; "" if the chunk is whole."""
    num = len(chunk.missing)
    if not num:
        return ""
    if num == chunk.num_cells:
        return "nothing is stored"
    cells = [
        key.removeprefix(f"{found.namespace}@").rpartition("@")[0]
        for key in chunk.missing[:MOST_NAMED]
    ]
    more = ", ..." if num > MOST_NAMED else ""
    return f"{num} of {chunk.num_cells} cells are missing: {', '.join(cells)}{more}"
