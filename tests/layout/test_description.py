"""An engine's cells are named alike from its description."""

import json

import pytest

from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.description import described, from_description
from vllm_kvpool.layout.topology import AttentionWindow, Context, LayerGroup, Topology
from vllm_kvpool.scheduler.prefix_search import CellNames

NAMESPACE = make_namespace("model", "0" * 12)


@pytest.mark.parametrize(
    "topology",
    [
        Topology(num_heads=8, tp_size=4, stages=((0, 5), (5, 8)), layer_span=3),
        Topology(num_heads=2, tp_size=8, stages=((0, 4),), layer_span=1, layer_group="full-2x64"),
        Topology(num_heads=8, tp_size=4, stages=((0, 4),), layer_span=4, per_head=False),
        Topology(
            num_heads=1, tp_size=4, stages=((0, 4),), layer_span=2, context=Context(dcp_size=4)
        ),
    ],
)
def test_names_and_sizes_are_the_same(topology: Topology) -> None:
    groups = [LayerGroup(topology, 64, AttentionWindow(sliding=100))]
    again = from_description(json.loads(json.dumps(described(groups))))
    assert again[0].window == groups[0].window
    one, other = (CellNames(NAMESPACE, each).key_prefixes(256) for each in (groups, again))
    assert one == other


def test_states_are_described_and_descriptions_without_them_stay_as_they_were() -> None:
    topology = Topology(num_heads=8, tp_size=2, stages=((0, 4),), layer_span=2, layer_group="state")
    groups = [LayerGroup(topology, 64, is_state=True), LayerGroup(topology, 64)]
    first, second = described(groups)
    assert first["state"] is True
    assert "state" not in second
    assert [group.is_state for group in from_description([first, second])] == [True, False]
    prefixes = CellNames(NAMESPACE, groups).key_prefixes(256)
    assert CellNames(NAMESPACE, from_description([first, second])).key_prefixes(256) == prefixes
