"""Why two namespaces are two: the values in which their manifests differ (pure)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.storage.contents.manifest import Manifest, digest_of, is_omitted

ABSENT = "(absent)"
MAX_SHOWN_CHARS = 200

# What to change so that a value is the same in both engines, by the beginning of its name.
REMEDIES = {
    "alone": "an option or code of this engine cannot be compared; its log names it",
    "architecture": "use the same model",
    "attn_temperature_tuning": "set max_model_len on one side of 32768 in both engines",
    "byte_order": "machines of unlike byte order share nothing",
    "chunk_tokens": "set chunk_tokens in kv_connector_extra_config to the same value",
    "code": "run the same plugins and classes of models; its parts say which differ",
    "configuration": "use the same model",
    "decode_context_parallel_size": "set it to the same number in both engines",
    "encrypted_cells": "give both engines encryption_key_file or encryption_key_command, or none",
    "engine": "start both engines with the same value of this option of vLLM",
    "environment": "set this environment variable of vLLM alike",
    "files": "use the same files of the model",
    "format": "run one release of vllm-kvpool",
    "layer_span": "set layer_span in kv_connector_extra_config to the same value",
    "kinds": "pages differ: start both engines with the same dtype and kv_cache_dtype",
    "namespace": "set namespace in kv_connector_extra_config to the same value",
    "rank_cells_of_tp": "set per_head_storage to true, or the same tensor_parallel_size",
    "remote_code": "use the same code of the model; repositories stand before the colon",
    "rope": "use the same rope options; max_model_len counts where it exceeds the model's own",
    "scheme": "run one release of vllm-kvpool",
    "weights": "load the same weights; set weights_id for the same weights in other files",
    "weights_version": "load the same weights: one engine's were changed while it ran",
}


class Difference(NamedTuple):
    """A value that two namespaces do not share; `ABSENT` where one has none."""

    name: str  # the names that lead to it, joined by dots
    first: Any
    second: Any

    @property
    def remedy(self) -> str:
        """What to change so that the value is the same in both engines."""
        return REMEDIES.get(self.name.partition(".")[0], "make this value the same")


class Explanation(NamedTuple):
    """Two namespaces and the values in which they differ."""

    first: Namespace
    second: Namespace
    differences: tuple[Difference, ...]


def explain(first: Manifest, second: Manifest) -> Explanation:
    """Where two namespaces, or two engines of one, differ, in the order of the values' names."""
    compared = [
        {**each.values, "weights_version": each.weights_version} for each in (first, second)
    ]
    if first.cells and second.cells:
        for values, each in zip(compared, (first, second), strict=True):
            values |= cut_of(each)
    return Explanation(first.namespace, second.namespace, tuple(_differences("", *compared)))


def cut_of(manifest: Manifest) -> dict[str, Any]:
    """How an engine cuts KV into cells: values that stand in keys, not in the namespace.

    `layer_span` counts layers, by kind of layer if there are several; with stages of pipeline
    parallelism that end within a span, it names these ends, too.
    """
    if not manifest.cells:  # of an engine that has not started
        return {}
    spans: dict[str, Any] = {}
    for group in manifest.cells:
        span, stages = int(group["span"]), group["stages"]
        edges = {edge for stage in stages for edge in stage if edge % span}
        within = sorted(edges - {max(stop for _, stop in stages)})
        spans[str(group["kind"])] = f"{span}, and ends at {within}" if within else span
    dcp = {int(group["dcp"]) for group in manifest.cells}
    return {
        "layer_span": spans[""] if spans.keys() == {""} else spans,
        "decode_context_parallel_size": max(dcp),
    }


def is_of_same_model(one: Manifest, other: Manifest) -> bool:
    """Whether two namespaces are of one model."""
    models = {each.namespace.partition("@")[0] for each in (one, other)}
    return one.namespace != other.namespace and len(models) == 1


def nearest(one: Manifest, others: Sequence[Manifest]) -> Explanation | None:
    """The other namespace that differs in the fewest values; None if there is no other."""
    found = [explain(one, other) for other in others if other.namespace != one.namespace]
    return min(found, key=lambda each: len(each.differences), default=None)


def short(value: Any) -> str:
    """A value for people, cut to `MAX_SHOWN_CHARS`."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _differences(name: str, first: Any, second: Any) -> Iterator[Difference]:
    if digest_of(first) == digest_of(second):
        return
    if _is_object(first) and _is_object(second):
        for each in sorted({*first, *second}):
            inner = f"{name}.{each}" if name else each
            yield from _differences(inner, first.get(each, ABSENT), second.get(each, ABSENT))
    else:
        yield Difference(name, first, second)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and not is_omitted(value)
