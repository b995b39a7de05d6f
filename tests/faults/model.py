"""A fake model: its KV is a function of weights and tokens, and its output a function of KV.

A token has K and V rows for every layer and head. The rows are hashed from the weights' seed and
all tokens up to this token, because attention makes KV depend on them. The next token is hashed
from rows that are read back from the pages. So an engine gives the right tokens exactly if its
pages are right. A layer with a recurrent state keeps one matrix a head instead, made of the last
token's row. An indexer keeps one key for `KEY_TOKENS` tokens, made of the last token's row.

A drafter's layers come after the model's. Their rows depend on later tokens, too: on as many as the
layer's look-ahead.

Legend: L layers, B blocks, H KV heads, N tokens of a block, D a key or value row, C = 2 * D, T
tokens.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

VOCAB = 1024
FIRST_TOKEN = 3  # smaller tokens have meanings
UNWRITTEN = -1.0  # rows are in [0, 1)

KEY_TOKENS, KEY_BYTES, SCALE_BYTES = 4, 132, 4  # bytes of a key and its scale

Tables = Sequence[NDArray[np.intp]]  # a request's blocks in each KV cache group

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A fake model's shape. `seed` stands for the weights: the pool must keep models of different
    seeds apart."""

    seed: int = 0
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"
    windows: tuple[int, ...] = ()
    """Number of tokens that each layer sees; 0, or no entries, means every token."""
    latent: bool = False
    """True if the single head is MLA's latent: `2 * head_dim` numbers that every rank holds."""
    states: tuple[int, ...] = ()
    """Layers with a recurrent state of `head_dim * head_dim / 2` numbers a head."""
    indexers: tuple[int, ...] = ()
    """Indexer layers. Each has a ring of the tokens that have no key yet."""

    def layer_name(self, layer: int) -> str:
        """Return vLLM's name of a layer of the model or the drafter."""
        if layer in self.indexers:
            return f"model.layers.{layer}.self_attn.indexer.k_cache"
        kind = "linear_attn" if layer in self.states else "self_attn.attn"
        return f"model.layers.{layer}.{kind}"

    def heads_of(self, rank: int, tp: int) -> slice:
        """Return the KV heads that a rank holds. With more ranks than heads, several ranks hold the
        same."""
        first = rank * self.heads // tp
        return slice(first, first + max(1, self.heads // tp))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def next_token(self, rows_lhtc: NDArray[np.floating]) -> int:
        """Return the token that follows a context with these rows."""
        count = rows_lhtc.shape[2]
        looked_at = rows_lhtc[:, :, [0, count // 3, count // 2, count - 1]]
        return FIRST_TOKEN + zlib.crc32(looked_at.tobytes()) % (VOCAB - FIRST_TOKEN)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the output of an engine that makes no error."""
        context = Context(self, prompt)
        for _ in range(max_tokens):
            context.extend([self.next_token(context.rows())])
        return context.tokens[len(prompt) :]


# Models with several KV cache groups, of two layers each.
WINDOWS = FakeModel(layers=6, windows=(40, 40, 0, 40, 40, 0))  # beside full attention
STATES = FakeModel(layers=6, states=(1, 2, 4, 5))  # beside full attention
INDEXERS = FakeModel(layers=6, heads=1, latent=True, indexers=(2, 3), states=(4, 5))


class Context:
    """A growing sequence of tokens, and the rows that its KV must have.

    `lookaheads`: of each layer of the drafter.
    """

    def __init__(
        self, model: FakeModel, tokens: Sequence[int], lookaheads: Sequence[int] = ()
    ) -> None:
        self._model = model
        self._lookaheads = lookaheads
        self._states: list[int] = []
        layers = model.layers + len(lookaheads)
        parts = np.arange(layers * model.heads * 2 * model.head_dim, dtype=np.uint64)
        parts_lhc = (parts * np.uint64(_STEP)).reshape(layers, model.heads, -1)
        self._parts_lhc, self._draft_parts_lhc = np.split(parts_lhc, [model.layers])
        self._rows_lhtc = np.empty((model.layers, model.heads, 0, 2 * model.head_dim))
        self.tokens: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        state = self._states[-1] if self._states else self._model.seed
        for token in tokens:
            state = _mix(state ^ (token * _STEP & _MASK))
            self._states.append(state)
        self.tokens.extend(tokens)

    def cut(self, count: int) -> None:
        """Forget all tokens but the first `count`."""
        del self.tokens[count:], self._states[count:]
        self._rows_lhtc = self._rows_lhtc[:, :, :count]

    def rows(self) -> NDArray[np.floating]:
        """Return the rows of all tokens, `[L, H, T, C]`."""
        known = self._rows_lhtc.shape[2]
        if known < len(self._states):
            new = self._rows_of(self._parts_lhc, known, len(self._states))
            dtype = np.dtype(self._model.dtype)
            self._rows_lhtc = np.concatenate([self._rows_lhtc, new], axis=2, dtype=dtype)
        return self._rows_lhtc

    def draft_rows(self, count: int) -> NDArray[np.floating]:
        """Return the drafter's rows of the first `count` tokens, `[L, H, T, C]`.

        Rows that depend on unknown tokens are `UNWRITTEN`.
        """
        shape = (len(self._lookaheads), self._model.heads, count, 2 * self._model.head_dim)
        rows_lhtc = np.full(shape, UNWRITTEN, self._model.dtype)
        for layer, ahead in enumerate(self._lookaheads):
            parts_lhc = self._draft_parts_lhc[layer : layer + 1]
            known = self._rows_of(parts_lhc, ahead, min(count + ahead, len(self._states)))
            rows_lhtc[layer, :, : known.shape[2]] = known[0]
        return rows_lhtc

    def _rows_of(
        self, parts_lhc: NDArray[np.uint64], start: int, stop: int
    ) -> NDArray[np.floating]:
        states = np.array(self._states[start:stop], dtype=np.uint64)
        mixed = states[:, None] + parts_lhc[:, :, None, :]
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        # Eleven bits are exact in every dtype.
        rows: NDArray[np.floating] = (mixed >> np.uint64(53)).astype(self._model.dtype) * 2.0**-11
        return rows


def _mix(state: int) -> int:
    state = (state + _STEP) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Pages:
    """The KV caches of one rank, in the layout of vLLM's CPU attention.

    Each head of a block holds `K[D, N]`, then `V[N, D]`; a latent is plain, `[N, C]`. All layers
    lie in one storage.

    `groups` are vLLM's KV cache groups, by the layers in each. As in vLLM, the first layers of all
    groups share their memory, the second ones, and so on.
    """

    def __init__(
        self,
        model: FakeModel,
        num_blocks: int,
        block_size: int,
        heads: slice,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self.heads = heads
        self._model = model
        self._block = block_size
        self._groups = groups
        held, dim = heads.stop - heads.start, model.head_dim
        shape = (max(map(len, groups)), num_blocks, held, block_size, 2 * dim)
        self._all_lbhnc = torch.full(shape, UNWRITTEN, dtype=model.torch_dtype)
        all_lbhnc = self._all_lbhnc.numpy()
        if model.latent:
            self._k_lbhdn = all_lbhnc[..., :dim].swapaxes(3, 4)
            self._v_lbhnd = all_lbhnc[..., dim:]
        else:
            flat = all_lbhnc.reshape(*shape[:3], -1)
            half = dim * block_size
            self._k_lbhdn = flat[..., :half].reshape(*shape[:3], dim, block_size)
            self._v_lbhnd = flat[..., half:].reshape(*shape[:3], block_size, dim)
        assert np.shares_memory(self._k_lbhdn, all_lbhnc)
        size = dim * dim // 2
        self._state_lbhc = all_lbhnc.reshape(*shape[:2], -1)[..., : held * size].reshape(
            *shape[:2], held, size
        )
        assert np.shares_memory(self._state_lbhc, all_lbhnc)
        self._has_states = [any(layer in model.states for layer in group) for group in groups]
        self._ring: dict[int, dict[int, NDArray[np.floating]]] = {}
        """Block -> rows of its newest tokens, by the token's number modulo `KEY_TOKENS`."""

    def fill(self, value: float) -> None:
        self._all_lbhnc.fill_(value)

    def by_layer(self) -> dict[str, torch.Tensor]:
        """Return each layer's pages, as vLLM passes them to `register_kv_caches`."""
        return {
            self._model.layer_name(layer): self._state_pages(place)
            if is_state
            else self._all_lbhnc[place]
            for group, is_state in zip(self._groups, self._has_states, strict=True)
            for place, layer in enumerate(group)
        } | {
            self._model.layer_name(layer): self._key_pages(place)
            for group in self._groups
            for place, layer in enumerate(group)
            if layer in self._model.indexers
        }

    def _key_pages(self, place: int) -> torch.Tensor:
        """Return an indexer's pages in bytes, `[B, 1, N / KEY_TOKENS, C]`. A block has the values
        of all keys, then their scales."""
        count = self._block // KEY_TOKENS
        pages_bc = self._all_lbhnc[place].view(torch.uint8).flatten(start_dim=1)
        return pages_bc[:, : count * KEY_BYTES].unflatten(1, (1, count, KEY_BYTES))

    def _keys_of(self, place: int, blocks: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Return all keys of these blocks, `[..., KEY_BYTES]`."""
        flat = self._key_pages(place).numpy()[blocks].reshape(len(blocks), -1)
        count = self._block // KEY_TOKENS
        values, scales = np.split(flat, [count * (KEY_BYTES - SCALE_BYTES)], axis=1)
        parts = [part.reshape(len(blocks) * count, -1) for part in (values, scales)]
        return np.concatenate(parts, axis=1)

    def _write_keys(
        self, place: int, table: NDArray[np.intp], first: int, rows_tc: NDArray[np.floating]
    ) -> None:
        count, pages = self._block // KEY_TOKENS, self._key_pages(place).numpy()
        for token, key in enumerate(keys_of(rows_tc), first):
            if (token + 1) % KEY_TOKENS:
                continue
            block_c = pages[table[token // self._block]].reshape(-1)
            assert np.shares_memory(block_c, pages)
            row = token % self._block // KEY_TOKENS
            values = KEY_BYTES - SCALE_BYTES
            block_c[row * values : (row + 1) * values] = key[:values]
            start = count * values + row * SCALE_BYTES
            block_c[start : start + SCALE_BYTES] = key[values:]

    def keys_are(self, tables: Tables, rows_lhtc: NDArray[np.floating]) -> bool:
        """Return True if the pages hold the keys of all tokens with these rows."""
        num_keys = rows_lhtc.shape[2] // KEY_TOKENS
        for table, layers in zip(tables, self._groups, strict=True):
            for place, layer in enumerate(layers):
                if layer not in self._model.indexers:
                    continue
                blocks = table[: -(-num_keys * KEY_TOKENS // self._block)]
                found = self._keys_of(place, blocks)[:num_keys]
                last_tc = rows_lhtc[layer, 0, KEY_TOKENS - 1 :: KEY_TOKENS]
                if num_keys and not np.array_equal(found, keys_of(last_tc)):
                    return False
        return True

    def ring_is(self, tables: Tables, rows_lhtc: NDArray[np.floating]) -> bool:
        """Return True if the ring holds the newest rows: those of the tokens without a key."""
        stop = rows_lhtc.shape[2]
        start = stop - stop % KEY_TOKENS
        if not self._model.indexers or start == stop:
            return True
        rows = self._ring.get(int(tables[-1][0]), {})
        layer = self._model.indexers[0]
        return all(
            np.array_equal(rows.get(token % KEY_TOKENS, ()), rows_lhtc[layer, 0, token])
            for token in range(start, stop)
        )

    def _write_ring(self, block: int, first: int, rows_tc: NDArray[np.floating]) -> None:
        ring = self._ring.setdefault(block, {})
        ring.update({token % KEY_TOKENS: row for token, row in enumerate(rows_tc, first)})

    def _state_pages(self, place: int) -> torch.Tensor:
        """Return the states' pages in bytes, `[B, 1, 1, C]`. The rest of a block, which only
        attention uses, lies between them."""
        pages_bc = self._all_lbhnc[place].view(torch.int8).flatten(start_dim=1)
        content = self._state_lbhc[0, 0].nbytes
        return pages_bc[:, None, None, :content]

    def write(self, tables: Tables, first: int, rows_lhtc: NDArray[np.floating]) -> None:
        """Write the rows of consecutive tokens from `first` on."""
        positions = np.arange(first, first + rows_lhtc.shape[2])
        for table, layers, is_state in zip(tables, self._groups, self._has_states, strict=True):
            if is_state:
                continue
            for place, layer in enumerate(layers):
                if layer in self._model.indexers:
                    self._write_keys(place, table, first, rows_lhtc[layer, 0])
            if not layers:
                self._write_ring(int(table[0]), first, rows_lhtc[self._model.indexers[0], 0])
            layers = self._attention(layers)
            if layers:
                rows_lhtc_own = rows_lhtc[layers, self.heads]
                self._write_rows(slice(0, len(layers)), table, positions, rows_lhtc_own)

    def write_drafts(self, tables: Tables, first: int, rows_lhtc: NDArray[np.floating]) -> None:
        """Write the drafter's rows of consecutive tokens from `first` on."""
        positions = np.arange(first, first + rows_lhtc.shape[2])
        for table, layers, places in self._draft_places(tables):
            self._write_rows(places, table, positions, rows_lhtc[layers, self.heads])

    def read_drafts(self, tables: Tables, count: int) -> NDArray[np.floating]:
        """Return the drafter's rows of the first `count` tokens, and this rank's heads."""
        rows: dict[int, NDArray[np.floating]] = {}
        for table, layers, places in self._draft_places(tables):
            rows.update(zip(layers, self._read_rows(places, table, count), strict=True))
        return np.stack([rows[layer] for layer in sorted(rows)])

    def _draft_places(
        self, tables: Tables
    ) -> Iterator[tuple[NDArray[np.intp], Sequence[int], slice]]:
        """Yield each group's block table, its layers of the drafter, and their places in pages."""
        for table, group in zip(tables, self._groups, strict=True):
            layers = [layer - self._model.layers for layer in group if layer >= self._model.layers]
            if layers:
                first = len(group) - len(layers)
                assert group[first] >= self._model.layers, group
                yield table, layers, slice(first, len(group))

    def _write_rows(
        self,
        places: slice,
        table: NDArray[np.intp],
        positions: NDArray[np.intp],
        rows_lhtc: NDArray[np.floating],
    ) -> None:
        blocks, offsets = table[positions // self._block], positions % self._block
        rows_tlhc, dim = rows_lhtc.transpose(2, 0, 1, 3), self._model.head_dim
        self._k_lbhdn[places, blocks, :, :, offsets] = rows_tlhc[..., :dim]
        self._v_lbhnd[places, blocks, :, offsets] = rows_tlhc[..., dim:]

    def _read_rows(
        self, places: slice, table: NDArray[np.intp], count: int
    ) -> NDArray[np.floating]:
        blocks = table[: -(-count // self._block)]
        k_lhbnd = self._k_lbhdn[places, blocks].transpose(0, 2, 1, 4, 3)
        v_lhbnd = self._v_lbhnd[places, blocks].transpose(0, 2, 1, 3, 4)
        both = np.concatenate([k_lhbnd, v_lhbnd], axis=-1)
        return both.reshape(*both.shape[:2], -1, both.shape[-1])[:, :, :count]

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, as vLLM does with new ones in a model with states."""
        self._all_lbhnc[:, list(blocks)] = 0

    def read(self, tables: Tables, count: int) -> NDArray[np.floating]:
        """Return `[L, H, T, C]` of the first `count` tokens and this rank's heads. Layers with
        states and indexers have no such rows and read as zeros."""
        rows = {}
        for table, layers, is_state in zip(tables, self._groups, self._has_states, strict=True):
            if is_state:
                held, dim = self.heads.stop - self.heads.start, self._model.head_dim
                rows.update(
                    dict.fromkeys(layers, np.zeros((held, count, 2 * dim), self._model.dtype))
                )
                continue
            keys = [layer for layer in layers if layer in self._model.indexers]
            nothing = np.zeros((1, count, 2 * self._model.head_dim), self._model.dtype)
            rows.update(dict.fromkeys(keys, nothing))
            layers = self._attention(layers)
            if layers:
                own = self._read_rows(slice(0, len(layers)), table, count)
                rows.update(zip(layers, own, strict=True))
        return np.stack([rows[layer] for layer in sorted(rows)])

    def _attention(self, layers: Sequence[int]) -> Sequence[int]:
        """Return the model's layers that have rows of tokens; these come first in a group."""
        own = set(range(self._model.layers)) - set(self._model.indexers)
        return [layer for layer in layers if layer in own]

    def state_of(self, row: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the state after a token, `[..., D * D / 2]`, made of its rows `[..., C]`."""
        return np.tile(row, self._model.head_dim // 4)

    def states_are(self, tables: Tables, last_lhc: NDArray[np.floating], column: int) -> bool:
        """Return True if the blocks in this column of the tables hold the states after a token.

        `last_lhc` are the token's rows.
        """
        return all(
            np.array_equal(
                self._state_lbhc[: len(layers), table[column]],
                self.state_of(last_lhc[layers, self.heads]),
            )
            for table, layers in self._of_states(tables)
        )

    def write_states(self, tables: Tables, last_lhc: NDArray[np.floating], column: int) -> None:
        """Write the states after a token into the blocks in this column of the tables."""
        for table, layers in self._of_states(tables):
            state = self.state_of(last_lhc[layers, self.heads])
            self._state_lbhc[: len(layers), table[column]] = state

    def copy_states(self, tables: Tables, source: int, column: int) -> None:
        """Copy states between the blocks in two columns of the tables."""
        for table, layers in self._of_states(tables):
            state = self._state_lbhc[: len(layers), table[source]]
            self._state_lbhc[: len(layers), table[column]] = state

    def _of_states(self, tables: Tables) -> Iterator[tuple[NDArray[np.intp], Sequence[int]]]:
        for table, layers, is_state in zip(tables, self._groups, self._has_states, strict=True):
            if is_state:
                yield table, layers


def keys_of(rows_tc: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return an indexer's keys, `[T, KEY_BYTES]`, each from the row of the last of its tokens."""
    rows = np.ascontiguousarray(rows_tc).view(np.uint8)
    return np.tile(rows, -(-KEY_BYTES // rows.shape[1]))[:, :KEY_BYTES]
