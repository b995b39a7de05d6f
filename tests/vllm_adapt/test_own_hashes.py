"""Hashes of vLLM's own prefix cache: the parts of a request's identity that they contain.

vLLM gives a request every block with an equal hash. If the hashes omit a part, the pool would save
KV of another request under this request's name. Each part of an identity is therefore in the hashes
of this release, or a rule keeps such hits from being saved. The rules are in `compat` and
`requests.py`. A release that changes the hashes fails a row.
"""

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tests.support.releases import since
from vllm_kvpool.identity.chunk_hash import ChunkChain, MediaItem, RequestIdentity
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.requests import RequestReader

IS_OLDER = since({"0.23.0": True, "0.32.0": False}, vllm.__version__)
HASHES_ADAPTERS = {"0.23.0": False, "0.31.0": True}  # their paths, too
BLOCK = 4
COUNT = 3 * BLOCK
ROWS = torch.arange(COUNT, dtype=torch.float32).view(-1, 1)
NAMED = "the name is the client's or a digest of the content: equal names are equal media"


init_none_hash(sha256)  # a random number before 0.32, once in a process


class Part(NamedTuple):
    """A part of an identity, and two requests that differ in it alone."""

    of: str  # a field of `RequestIdentity`, or of `MediaItem`
    one: dict[str, Any]
    other: dict[str, Any]
    in_hashes: tuple[bool, bool]
    """True if vLLM's hashes contain the part: (before 0.31, since 0.31)."""
    rule: str = ""
    """Rule that keeps hits from being saved where the hashes lack the part."""


def medium(identifier: str = "cat", offset: int = 2, length: int = 6) -> dict[str, Any]:
    place = PlaceholderRange(offset=offset, length=length)
    feature = MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=place
    )
    return {"mm_features": [feature]}


def lora(name: str, path: str = "/a", number: int = 1) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, number, path)}


def embeds(rows: torch.Tensor = ROWS, *, tokens: int | None = None) -> dict[str, Any]:
    """Return embeddings whose first `tokens` rows are tokens; None: embeddings alone."""
    if tokens is None:
        return {"prompt_token_ids": None, "prompt_embeds": rows}
    return {"prompt_embeds": rows, "prompt_is_token_ids": [i < tokens for i in range(COUNT)]}


BOTH, NEWER, NEITHER = (True, True), (False, True), (False, False)
PARTS = {
    "tokens": Part("", {}, {"prompt_token_ids": [7] * COUNT}, BOTH),
    "adapters of two names": Part("adapter", lora("a"), lora("b", "/b", 2), BOTH),
    "adapters of one name": Part("adapter", lora("a"), lora("a", "/b", 2), NEWER, "OwnCaches"),
    "adapters of one name and path": Part(
        "adapter", lora("a"), lora("a", number=2), NEITHER, "OwnCaches"
    ),
    "an adapter or none": Part("adapter", lora("a"), {}, BOTH),
    "salts": Part("cache_salt", {"cache_salt": "a"}, {"cache_salt": "b"}, BOTH),
    "an adapter or a salt": Part("cache_salt", lora("a"), {"cache_salt": "a"}, NEWER, "OwnCaches"),
    "media": Part("identifier", medium(), medium("dog"), BOTH),
    "where a medium begins": Part("start", medium(), medium(offset=3), BOTH),
    "where a medium ends": Part("stop", medium(length=10), medium(length=11), NEITHER, NAMED),
    "embeddings": Part("embeds", embeds(), embeds(ROWS + 1), BOTH),
    "embeddings or tokens": Part("embeds", embeds(), {}, BOTH),
    "which rows are tokens": Part("embeds", embeds(tokens=2), embeds(tokens=6), NEITHER, "DEFECTS"),
    "rows or tokens of a prompt of embeddings": Part(
        "embeds", embeds(tokens=2), embeds(), NEITHER, "DEFECTS"
    ),
}


def asked(**said: Any) -> Request:
    """Return a request with vLLM's own hashes."""
    values: dict[str, Any] = {"prompt_token_ids": [0] * COUNT, "pooling_params": None} | said
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", sampling_params=SamplingParams(max_tokens=4), block_hasher=hasher, **values)


def chain(request: Request) -> list[bytes]:
    """Return the pool's hashes. Without files, an adapter counts by its id here."""
    lora_request, request.lora_request = request.lora_request, None
    reader = RequestReader(MetricsRegistry(), media_are_named=True)
    seen = reader.read(request)
    identity = seen.identity()
    assert identity is not None
    adapter = b"" if lora_request is None else b"%d" % lora_request.lora_int_id
    made = ChunkChain(
        BLOCK,
        RequestIdentity(adapter, identity.cache_salt, identity.media, identity.embeds),
    )
    made.extend(seen.tokens())
    return made.hashes


@pytest.mark.parametrize("name", PARTS)
def test_vllms_hashes_have_a_part_or_a_rule_does_without(name: str) -> None:
    part = PARTS[name]
    one, other = asked(**part.one), asked(**part.other)
    in_hashes = part.in_hashes[since(HASHES_ADAPTERS, vllm.__version__)]
    assert all(len(each.block_hashes) == COUNT // BLOCK for each in (one, other))
    assert set(one.block_hashes).isdisjoint(other.block_hashes) is in_hashes
    assert chain(one) != chain(other)
    assert bool(part.rule) is (False in part.in_hashes)


def test_every_part_of_an_identity_is_in_the_table() -> None:
    parts = {field.name for each in (RequestIdentity, MediaItem) for field in fields(each)}
    # All requests of an engine have the same releases.
    assert parts - {"media", "releases"} == {part.of for part in PARTS.values()} - {""}


@pytest.mark.parametrize(
    ("is_mistaken", "name"),
    [
        (compat._takes_salts_for_adapters, "an adapter or a salt"),
        (compat._takes_embeddings_for_tokens, "rows or tokens of a prompt of embeddings"),
    ],
)
def test_what_compat_tries_is_what_the_hashes_do(
    is_mistaken: Callable[[], bool], name: str
) -> None:
    one, other = asked(**PARTS[name].one), asked(**PARTS[name].other)
    assert is_mistaken() is (one.block_hashes[0] == other.block_hashes[0])


def test_a_block_whose_token_a_session_has_replaced_is_known_by_its_old_hash_or_not() -> None:
    """vLLM's own update of a session removes its last token, which has no KV yet."""
    session = asked(prompt_token_ids=[5] * (BLOCK - 1), resumable=True)
    session.append_output_token_ids([6])  # fills the block
    session.num_computed_tokens = BLOCK - 1
    session.status = RequestStatus.WAITING
    update: Any = SimpleNamespace(
        mm_features=None,
        prompt_token_ids=[7] * BLOCK,
        max_tokens=4,
        arrival_time=0.0,
        sampling_params=session.sampling_params,
    )
    scheduler: Any = SimpleNamespace(hash_block_size=BLOCK, log_stats=False)
    Scheduler._update_request_as_session(scheduler, session, update)
    assert session.all_token_ids[:BLOCK] == [*[5] * (BLOCK - 1), 7]
    right = asked(prompt_token_ids=[*[5] * (BLOCK - 1), 7])
    wrong = asked(prompt_token_ids=[*[5] * (BLOCK - 1), 6])
    held = wrong if compat._keeps_names_of_sessions() else right
    assert session.block_hashes[0] == held.block_hashes[0]
    assert compat._keeps_names_of_sessions() is IS_OLDER
