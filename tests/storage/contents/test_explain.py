"""In what two namespaces differ, and what to change."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.identity.keys import Namespace, make_namespace
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.storage.contents.manifest import (
    ABSENT,
    MANIFEST_BYTES,
    MAX_SHOWN_CHARS,
    REMEDIES,
    Difference,
    Manifest,
    explain,
    nearest,
    read_manifest,
    short_pair,
    write_manifest,
)

FIRST, SECOND, THIRD = (make_namespace("model", digit * 12) for digit in "012")


def manifest(namespace: Namespace, values: dict[str, Any], epoch: str = "") -> Manifest:
    return Manifest(namespace, namespace, epoch, values)


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a"]),
        ({"a": {"b": 1, "c": [1, 2]}}, {"a": {"b": 1, "c": [1]}}, ["a.c"]),
        ({"a": {"b": 1}}, {"a": 1}, ["a"]),
        ({"a": 1, "b": 2}, {"b": 2, "c": 3}, ["a", "c"]),
        ({"files": {"config.json": {"n": 1}}}, {"files": {}}, ["files.config.json"]),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),  # as JSON has them
    ],
)
def test_each_value_that_differs_is_named(
    first: dict[str, Any], second: dict[str, Any], names: list[str]
) -> None:
    found = explain(manifest(FIRST, first), manifest(SECOND, second))
    assert [each.name for each in found.differences] == names


def test_a_value_that_one_lacks_is_absent() -> None:
    [found] = explain(manifest(FIRST, {}), manifest(SECOND, {"rope": 1})).differences
    assert found == Difference("rope", ABSENT, 1)
    assert found.remedy == REMEDIES["rope"]


def test_the_version_of_the_weights_is_a_value() -> None:
    [found] = explain(manifest(FIRST, {}), manifest(SECOND, {}, "v2")).differences
    assert found.name == "weights_version"


def cells(span: int, kind: str = "", stages: tuple[tuple[int, int], ...] = ((0, 6),)) -> Any:
    [one] = described([LayerGroup(Topology(2, 1, stages, span, layer_group=kind), 64)])
    return one


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ((cells(2),), (cells(2),), []),
        ((cells(2),), (cells(4),), ["layer_span"]),
        ((cells(4),), (cells(4, stages=((0, 4), (4, 6))),), []),
        ((cells(4),), (cells(4, stages=((0, 3), (3, 6))),), ["layer_span"]),
        ((cells(2, "a"), cells(2, "b")), (cells(2, "a"), cells(3, "b")), ["layer_span.b"]),
        ((cells(2),), ({**cells(2), "dcp": 2},), ["decode_context_parallel_size"]),
        ((cells(2),), (), []),  # of an engine that has not started
    ],
)
def test_what_keys_have_and_namespaces_have_not_is_named(
    first: Any, second: Any, names: list[str]
) -> None:
    one, other = (Manifest(FIRST, FIRST, "", {}, each) for each in (first, second))
    found = explain(one, other).differences
    assert [each.name for each in found] == names
    assert all(each.name.partition(".")[0] in REMEDIES for each in found)


def test_long_values_are_compared_by_their_digests() -> None:
    """A manifest may omit a value that another has, where its own other values are longer."""
    long = {"ignore": ["layer"] * 1000}
    values = [{"files": long, "more": "x" * count} for count in (0, 9_000)]
    read = [read_manifest(write_manifest(manifest(FIRST, each)), FIRST) for each in values]
    assert read[0] is not None
    assert read[1] is not None
    assert "omitted_bytes" not in str(read[0].values["files"])
    assert "omitted_bytes" in str(read[1].values["files"])
    assert len(str(long)) < MANIFEST_BYTES * 2
    assert [each.name for each in explain(*read).differences] == ["more"]


def test_the_nearest_differs_in_the_fewest_values() -> None:
    one = manifest(FIRST, {"a": 1, "b": 1})
    others = [manifest(SECOND, {"a": 2, "b": 2}), manifest(THIRD, {"a": 1, "b": 2}), one]
    found = nearest(one, others)
    assert found is not None
    assert found.second == THIRD
    assert nearest(one, [one]) is None


LAYERS = [{"layer": i, "dtype": "bfloat16", "kind": "full", "rows": 128} for i in range(30)]


def changed(layer: int, **values: Any) -> list[dict[str, Any]]:
    return [{**each, **values} if each["layer"] == layer else each for each in LAYERS]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (LAYERS, changed(29, dtype="float16"), ('"bfloat16"', '"float16"')),
        (LAYERS, LAYERS[:-1], ('"layer": 29', "29 more are equal")),
        ("x" * 1000 + "a", "x" * 1000 + "b", ("xa", "xb")),
        ("x" * 1000, "x" * 1001, ("x", "x")),
        (1, 2, ("1", "2")),
        (1, "1", ("1", '"1"')),
        ([1] * 300, [1] * 301, ("1", "1")),
        ({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 3]}, ("2", "3")),
    ],
)
def test_values_are_shown_where_they_differ(first: Any, second: Any, words: Any) -> None:
    """A model of 30 layers has lists whose first 200 characters are equal."""
    for one, other, expected in ((first, second, words), (second, first, words[::-1])):
        shown = short_pair(one, other)
        assert shown[0] != shown[1]
        assert max(map(len, shown)) <= MAX_SHOWN_CHARS + 2 * len("...")
        for text, word in zip(shown, expected, strict=True):
            assert word in text


values = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=3) | st.text("a", min_size=290, max_size=310),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=12,
)


@given(values, values)
def test_two_values_that_differ_are_never_shown_alike(first: Any, second: Any) -> None:
    if first != second:
        one, other = short_pair(first, second)
        assert one != other
