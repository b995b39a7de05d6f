"""`kvpool explain`: why two namespaces share nothing, from what stores say of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvpool.cli.stores import NamedStore
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.storage.base import Listing
from vllm_kvpool.storage.explain import Explanation, explain, short
from vllm_kvpool.storage.manifest import Manifest, manifest_in


def explanations(stores: Sequence[NamedStore], names: Sequence[str]) -> list[Explanation]:
    """Of two names: where these namespaces differ. Of one: where each other one of its model
    differs from it. Of none: that for each pair of one model. ConfigError for unknown names."""
    known = manifests(stores)
    chosen = [_named(stores, known, name) for name in names]
    if len(chosen) == 2:
        return [explain(*chosen)]
    found = []
    ordered = chosen or sorted(known.values())
    for i, one in enumerate(ordered):
        others = known.values() if chosen else ordered[i + 1 :]
        found += [explain(one, other) for other in others if is_of_same_model(one, other)]
    return found


def manifest_named(stores: Sequence[NamedStore], name: str) -> Manifest:
    """The manifest of a namespace, given as in `explanations`; ConfigError if there is none."""
    return _named(stores, manifests(stores), name)


def is_of_same_model(one: Manifest, other: Manifest) -> bool:
    """Whether two namespaces are of one model."""
    models = {each.namespace.partition("@")[0] for each in (one, other)}
    return one.namespace != other.namespace and len(models) == 1


def manifests(stores: Sequence[NamedStore]) -> dict[Namespace, Manifest]:
    """The manifests of all namespaces that stores can list."""
    found = {}
    for each in stores:
        if isinstance(each.store, Listing):
            for name in each.store.namespaces():
                manifest = manifest_in(each.store, Namespace(name))
                if manifest is not None:
                    found[manifest.namespace] = manifest
    return found


def _named(
    stores: Sequence[NamedStore], known: Mapping[Namespace, Manifest], name: str
) -> Manifest:
    """The manifest of a namespace, given whole, or by the beginning of its name or digest."""
    for each in stores:
        if "@" in name and (manifest := manifest_in(each.store, Namespace(name))) is not None:
            return manifest
    matching = [
        each for each in known if each.startswith(name) or each.rpartition(":")[2].startswith(name)
    ]
    if len(matching) == 1:
        return known[matching[0]]
    there_are = ", ".join(sorted(matching or known)) or "none"
    if matching:
        raise ConfigError(f"{name!r} stands for several namespaces: {there_are}")
    raise ConfigError(f"no namespace {name!r} with a manifest in these stores; found: {there_are}")


def as_json(found: Sequence[Explanation]) -> list[dict[str, Any]]:
    """Explanations as JSON."""
    return [
        {
            "first": first,
            "second": second,
            "differences": [{**each._asdict(), "remedy": each.remedy} for each in differences],
        }
        for first, second, differences in found
    ]


def as_text(found: Sequence[Explanation]) -> str:
    """Explanations in words."""
    return "\n\n".join(map(_in_words, found)) or "no two namespaces of one model to compare"


def _in_words(explanation: Explanation) -> str:
    first, second, differences = explanation
    if not differences:
        return f"{first}\n{second}\nhave equal values: releases of vllm-kvpool differ"
    many = "1 value" if len(differences) == 1 else f"{len(differences)} values"
    lines = [first, second, f"share nothing, as they differ in {many}:"]
    for each in differences:
        values = f"    {short(each.first)}\n    {short(each.second)}"
        lines += [f"  {each.name}", values, f"    -> {each.remedy}"]
    return "\n".join(lines)
