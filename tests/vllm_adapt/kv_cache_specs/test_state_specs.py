"""Recurrent states of every kind: the same bytes from every engine, and back into any other.

Each engine distributes a whole model's state to its ranks as vLLM does (`vllm_states.py`).
"""

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.moves import cell_move
from tests.vllm_adapt.vllm_states import KINDS, Kind, Layer, WholeState, engine_of
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.pages import SlabMove
from vllm_kvpool.layout.topology import LayerGroup, Topology, cells_of_rank
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.vllm_adapt.kv_cache_specs.state_specs import (
    check_blocks,
    content_of,
    kind_of,
    state_form,
    state_pages,
)

NUM_BLOCKS, LAYERS, BLOCK, POISON = 4, 2, 2, 0xA5
Store = dict[str, bytes]


class Engine(NamedTuple):
    """The properties in which two sharing engines may differ."""

    tp_size: int
    layout: str
    drafts: int


ENGINES = [Engine(*each) for each in itertools.product((1, 2, 4, 8), ("SD", "DS"), (0, 2))]


@pytest.fixture
def use_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that sets vLLM's layout of convolutions to an engine's."""

    def use(layout: str) -> None:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        mamba_utils.get_conv_state_layout.cache_clear()

    yield use
    monkeypatch.undo()
    mamba_utils.get_conv_state_layout.cache_clear()


@dataclass
class Rank:
    """A rank's layers, bound by vLLM, over poisoned memory with a gap after each page."""

    kind: Kind
    engine: Engine
    tp_rank: int

    def __post_init__(self) -> None:
        spec = self.kind.spec(self.engine.tp_size, self.engine.drafts)
        nbytes = spec.state_content_size_bytes
        shape = (NUM_BLOCKS, LAYERS, nbytes + 64)
        self.memory = torch.full(shape, POISON, dtype=torch.uint8).view(torch.int8)
        caches = [self.memory[:, i, None, None, :nbytes] for i in range(LAYERS)]
        self.layers = [Layer(spec) for _ in caches]
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.bind_kv_cache(cache)
        config = engine_of(self.kind, self.engine.tp_size, self.engine.drafts)
        form = state_form(spec, config)
        self.copier = CpuCopier([state_pages(cache, spec, form, config) for cache in caches])
        topology = Topology(form.num_units, self.engine.tp_size, ((0, LAYERS),), LAYERS)
        self.cells = cells_of_rank(
            [LayerGroup(topology, form.row_bytes, is_state=True)], self.tp_rank, 0
        )

    def compute(self) -> None:
        """Write a random state into each layer, as the model would."""
        place = (self.tp_rank, self.engine.tp_size)
        for seed, layer in enumerate(self.layers):
            state = WholeState.random(self.kind, seed)
            state.put(self.kind, layer, BLOCK, place, self.engine.layout == "DS")

    def save(self, store: Store) -> None:
        for cell, slot, move in self._moves():
            self.copier.gather([move])
            assert store.setdefault(str(cell.shard), bytes(slot)) == bytes(slot)

    def load(self, store: Store) -> None:
        for cell, slot, move in self._moves():
            slot[:] = np.frombuffer(store[str(cell.shard)], np.uint8)
            self.copier.scatter([move])

    def _moves(self) -> Iterator[tuple[Any, Any, SlabMove]]:
        for cell in self.cells:
            slot = np.zeros(cell.payload_bytes(1), np.uint8)
            place = 0, LAYERS, cell.head_start, cell.head_stop
            yield cell, slot, cell_move(slot.ctypes.data, place, [BLOCK], chunk_tokens=1)


@pytest.mark.parametrize("name", KINDS)
def test_every_engine_writes_the_same_cells_and_reads_those_of_any_other(
    name: str, use_layout: Any
) -> None:
    kind = KINDS[name]
    first: Store = {}
    for engine in ENGINES:
        if engine.tp_size > kind.most_ranks:
            continue
        use_layout(engine.layout)
        store: Store = {}
        for tp_rank in range(engine.tp_size):
            rank = Rank(kind, engine, tp_rank)
            rank.compute()
            rank.save(store)
        first = first or store
        assert store == first, engine
        for tp_rank in range(engine.tp_size):
            computed, loaded = Rank(kind, engine, tp_rank), Rank(kind, engine, tp_rank)
            computed.compute()
            loaded.load(first)
            assert torch.equal(loaded.memory, computed.memory), (engine, tp_rank)


@pytest.mark.parametrize("name", KINDS)
def test_units_are_the_models_alone(name: str, use_layout: Any) -> None:
    kind = KINDS[name]
    forms = []
    for engine in ENGINES:
        if engine.tp_size <= kind.most_ranks:
            use_layout(engine.layout)
            spec = kind.spec(engine.tp_size, engine.drafts)
            forms.append(state_form(spec, engine_of(kind, engine.tp_size, engine.drafts)))
            assert content_of(spec, forms[-1]) == content_of(kind.spec(1, engine.drafts), forms[-1])
    assert len(set(forms)) == 1
    assert forms[0].num_units == (1 if kind.replicated else kind.most_ranks)


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_of_accepted_drafts_the_window_is_what_vllm_copies(accepted: int, use_layout: Any) -> None:
    """vLLM moves the window to the first rows of the block that it offers. These rows are saved."""
    use_layout("SD")
    kind, engine = KINDS["GDN"], Engine(1, "SD", 2)
    rank = Rank(kind, engine, 0)
    rank.compute()
    window = rank.layers[0].kv_cache[0]
    window[1] = torch.randn(window[1].shape).to(window.dtype)
    copy = mamba_utils.get_conv_copy_spec(window, [1], 0, accepted)
    nbytes = copy.num_elements * window.element_size()
    ctypes.memmove(window[BLOCK].data_ptr(), copy.start_addr, nbytes)
    expected = window[1, accepted - 1 : accepted + 2].clone()
    store: Store = {}
    rank.save(store)
    other = Rank(kind, Engine(1, "SD", 0), 0)
    other.load(store)
    assert torch.equal(other.layers[0].kv_cache[0][BLOCK], expected)


def test_kinds_have_names_of_their_own() -> None:
    names = {kind_of(kind.spec(1)) for kind in KINDS.values()}
    assert names == {"short_conv", "mamba1", "mamba2", "gdn", "linear"}


def test_what_makes_bytes_is_told_apart(use_layout: Any) -> None:
    use_layout("SD")
    kind = KINDS["GDN"]
    config = engine_of(kind, 1)
    plain = kind.spec(1)
    specs = (
        plain,
        replace(plain, dtypes=(torch.float16, torch.float32)),
        replace(plain, dtypes=(torch.bfloat16, torch.bfloat16)),
        replace(plain, shapes=((4, 112), (8, 6, 8))),
        replace(plain, shapes=((3, 112), (6, 8, 8))),
    )
    contents = [content_of(spec, state_form(spec, config)) for spec in specs]
    assert all(a != b for a, b in itertools.combinations(contents, 2))


def test_what_cannot_be_cut_is_refused_by_name(use_layout: Any) -> None:
    use_layout("SD")
    mamba2, one_group = KINDS["Mamba2"], KINDS["Mamba2 with one group"]
    plain = mamba2.spec(1)
    with pytest.raises(ConfigError, match="told apart into parts"):
        state_form(replace(plain, shapes=((3, 190), plain.shapes[1])), engine_of(mamba2, 1))
    with pytest.raises(ConfigError, match="run it without drafts"):
        state_form(plain, engine_of(mamba2, 1, drafts=3))
    unnamed = engine_of(one_group, 2)
    unnamed.model_config.hf_text_config.mamba_n_groups = None
    with pytest.raises(ConfigError, match="tensor_parallel_size to 1"):
        state_form(one_group.spec(2), unnamed)
    many = replace(KINDS["short convolution"].spec(32), shapes=((2, 2),))
    with pytest.raises(ConfigError, match="at most 16"):
        state_form(many, engine_of(KINDS["short convolution"], 32))


def test_the_example_of_a_hybrid_is_accepted() -> None:
    """vLLM's own parser accepts the example, and its blocks fit the chunks."""
    root = Path(__file__).parents[3]
    path = root / "configs" / "hybrid.yaml"
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--config", str(path)])
    assert arguments.kv_transfer_config.kv_connector == "KVPoolConnector"
    options = read_config(arguments.kv_transfer_config.kv_connector_extra_config, env={})
    check_blocks(arguments.block_size, options.chunk_tokens)
    assert str(path.relative_to(root)) in (root / "docs" / "models.md").read_text()
