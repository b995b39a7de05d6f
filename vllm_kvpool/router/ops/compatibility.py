"""The engines that cannot share KV or models with the others, and what to set (pure).

Read off what each engine says of itself in `/metrics` and `/v1/models`. Such an engine serves all
the same: its answers are right, but no request can be handed to it, or from it, through the pool.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from vllm_kvpool.identity.keys import Namespace, manifest_key
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.states import UP, ReplicaId

MAX_NAMED = 3
ENABLE = """--kv-transfer-config '{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}'"""


class Mismatch(Enum):
    """In what an engine differs."""

    NO_CONNECTOR = "no_connector"
    NAMESPACE = "namespace"
    CHUNK_TOKENS = "chunk_tokens"
    MODEL = "model"
    NO_SHARED_STORE = "no_shared_store"
    NO_SLEEP = "no_sleep"


class Problem(NamedTuple):
    """A difference that keeps engines from sharing, with its remedy."""

    mismatch: Mismatch
    why: str
    """A difference between two engines, and the option to set."""


def problems(fleet: Fleet) -> dict[ReplicaId, Problem]:
    """Return at most one problem of each engine that is loaded and measured, or was to sleep."""
    known = [each for each in fleet if each.state in UP and each.sampled_at is not None]
    found = {
        each.replica_id: Problem(
            Mismatch.NO_CONNECTOR,
            f"runs without KVPoolConnector, so it shares no KV; start it with {ENABLE}",
        )
        for each in known
        if not each.sample.has_connector
    }
    for each in fleet:
        if each.health.sleep_error:
            found[each.replica_id] = Problem(Mismatch.NO_SLEEP, each.health.sleep_error)
    by_model: dict[str, list[Replica]] = {}
    for each in known:
        for model in sorted(each.models):
            by_model.setdefault(model, []).append(each)
    for model, served_by in by_model.items():
        for replica_id, problem in _of_model(model, served_by):
            found.setdefault(replica_id, problem)
    for replica_id, problem in _apart(fleet):
        found.setdefault(replica_id, problem)
    for each in known:
        others = sorted(by_model.keys() - each.models)
        if others and each.models and all(len(by_model[model]) == 1 for model in each.models):
            why = (
                f"is the only engine that serves {_names(each.models)}, others serve "
                f"{_names(others)}: no other can go on with its requests; if that is not meant, "
                "check its --model and --served-model-name"
            )
            found.setdefault(each.replica_id, Problem(Mismatch.MODEL, why))
    return found


def _apart(fleet: Fleet) -> Iterator[tuple[ReplicaId, Problem]]:
    """Yield decoders that find nothing of what some replicas save."""
    sources: dict[ReplicaId, list[ReplicaId]] = {}
    for source, decoder in fleet.handovers.apart():
        sources.setdefault(decoder, []).append(source)
    for decoder, found in sources.items():
        why = (
            f"has found none of the last prompts that {_names(found)} computed and saved, so these "
            "engines share no store and nothing is handed over between them; give each engine's "
            "kv_connector_extra_config one store that all hosts reach (mooncake://, s3://, or "
            "file:// on a file system that all hosts mount); if they have one, raise "
            "front.expect_timeout_ms above the time that a save takes"
        )
        yield decoder, Problem(Mismatch.NO_SHARED_STORE, why)


def _names(models: Iterable[str]) -> str:
    return ", ".join(sorted(models)[:MAX_NAMED])


def _of_model(model: str, served_by: list[Replica]) -> Iterator[tuple[ReplicaId, Problem]]:
    """Yield the engines that differ from the majority of their model's engines.

    On a tie the first engine's value is the majority.
    """
    known = [each for each in served_by if each.sample.namespace]
    if not known:
        return
    usual = Counter((each.sample.namespace, each.sample.chunk_tokens) for each in known)
    (namespace, chunk_tokens), _ = usual.most_common(1)[0]
    for each in known:
        own = each.sample
        if own.chunk_tokens != chunk_tokens:
            yield (
                each.replica_id,
                Problem(
                    Mismatch.CHUNK_TOKENS,
                    f"has chunk_tokens {own.chunk_tokens}, most engines of {model} have "
                    f"{chunk_tokens}, so they share no KV; set chunk_tokens to {chunk_tokens} in "
                    "its kv_connector_extra_config",
                ),
            )
        elif own.namespace != namespace:
            yield (
                each.replica_id,
                Problem(
                    Mismatch.NAMESPACE,
                    f"has the KV namespace {own.namespace}, most engines of {model} have "
                    f"{namespace}, so they share no KV; start it with the same model, dtype, "
                    "namespace and weights_id (what differs: the objects "
                    f"{manifest_key(Namespace(own.namespace))} and "
                    f"{manifest_key(Namespace(namespace))} of the store)",
                ),
            )
