"""vLLM's requests as the pool's `RequestView`s."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_kvpool.config import OPTIONS_NOT_READ, RequestOptions, read_request_options
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.chunk_hash import MediaItem, RequestIdentity, tenant_of
from vllm_kvpool.identity.weights import FileState, adapter_stamp, digest_adapter
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.request import OwnKV
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.identity.factors import canonical, encoded
from vllm_kvpool.vllm_adapt.identity.weights_version import MAX_ADAPTERS, adapter_as_loaded
from vllm_kvpool.vllm_adapt.tracing import record_span
from vllm_kvpool.vllm_adapt.weight_sources import local_directory

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_OWN_NAMES = 65_536  # LoRA adapters between two resets of the engine's own prefix cache: 14 MB

MAX_KEYS_OF_NAME = 16  # adapters under one name of vLLM's; beyond, their content is not known


class AdapterDigests:
    """Content digests of LoRA adapters as they were when this engine first met them.

    An engine meets an adapter by a request or because it was told to load it. Owned by the thread
    that reads adapters. Keyed by the adapter's id too: another content at the same path comes with
    another id, or says `load_inplace`. An adapter whose files have changed since has no digest. The
    engine keeps the old weights until it drops them for want of places (`max_cpu_loras`) or by
    `remove_lora`; then it reads the new files under the same id. An adapter under the former id of
    another adapter has no digest either: the engine may compute with that one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Adapter] = {}
        self._path_of: dict[int, str] = {}  # of the adapter that vLLM has under an id

    def of(self, adapter_id: int, path: str, reload: bool) -> bytes:
        """Return the digest; the first call reads the adapter's files.

        Later calls check that the files have not changed. Raises OSError.
        """
        key = (adapter_id, path)
        known = self._known.get(key)
        if (loaded := self._path_of.get(adapter_id, path)) != path:
            raise OSError(
                f"the LoRA adapter {path} has the id {adapter_id} of {loaded}, and vLLM computes "
                "with the one that it has loaded; load it under another id"
            )
        if reload or known is None:
            directory = local_directory(path, None)
            if directory is None:
                raise FileNotFoundError(f"the LoRA adapter {path} is not in local files")
            if len(self._known) >= MAX_ADAPTERS:
                del self._known[next(iter(self._known))]  # its files are read again
            stamp = adapter_stamp(directory)
            if adapter_as_loaded(adapter_id, path) not in (None, stamp) and not reload:
                raise _changed(path)
            known = self._known[key] = _Adapter(directory, stamp, digest_adapter(directory))
        with contextlib.suppress(FileNotFoundError):  # removed: nothing else can be read there
            if adapter_stamp(known.directory) != known.stamp:
                raise _changed(path)
        return known.digest

    def loaded(self, adapter_id: int, path: str, *, in_place: bool) -> None:
        """Note an adapter of which vLLM is told, by a request or to load it.

        Unless `in_place`, vLLM goes on with what it has under that id. Scheduler's thread.
        """
        if in_place or adapter_id not in self._path_of:
            self._path_of[adapter_id] = path
            if len(self._path_of) > MAX_ADAPTERS:
                del self._path_of[next(iter(self._path_of))]

    def removed(self, adapter_id: int) -> None:
        """Note that vLLM has no adapter under that id any more. Scheduler's thread."""
        self._path_of.pop(adapter_id, None)

    def known(self, adapter_id: int, path: str) -> bytes | None:
        """Return the digest, if it has been read. Any thread."""
        adapter = self._known.get((adapter_id, path))
        return None if adapter is None else adapter.digest


def _changed(path: str) -> OSError:
    return OSError(
        f"the files of the LoRA adapter {path} have changed since it was first used, and whether "
        "the engine has the old or the new ones is not known; load it under another name"
    )


class _Adapter(NamedTuple):
    directory: Path
    stamp: tuple[FileState, ...]
    digest: bytes


class AdapterKey(NamedTuple):
    """An adapter as requests name it. Its content is known by `AdapterDigests`."""

    adapter_id: int
    path: str
    how_read: bytes


NO_ADAPTER = AdapterKey(0, "", b"")  # the base model
UNKNOWN = AdapterKey(-1, "", b"")  # any content


class OwnCaches:
    """The adapters with which an engine may have computed what its own caches hold.

    vLLM names blocks and embeddings by an adapter's name, not by its content, so it may hand a
    request what another adapter has computed. Every request is noted when it is admitted, whether
    it is shared or not. Scheduler's thread.
    """

    def __init__(self, digests: AdapterDigests) -> None:
        self._digests = digests
        # None may be forgotten before a reset: blocks of any of them may be in that cache.
        self._of_blocks: dict[Hashable, set[AdapterKey]] = {}
        self._of_embeddings: dict[str, set[AdapterKey]] = {}

    def hold_blocks(self, name: Hashable, key: AdapterKey) -> bool:
        """Note that blocks will be computed under vLLM's `name` with this adapter.

        Returns True if all blocks by that name are known to be of the same content.
        """
        return self._hold(self._of_blocks, name, {key})

    def hold_embeddings(self, name: str, block_name: Hashable, key: AdapterKey) -> bool:
        """Note that embeddings will be computed under `name`, as `hold_blocks` does for blocks.

        Blocks under `block_name` are computed from them.
        """
        is_own = self._hold(self._of_embeddings, name, {key})
        self._hold(self._of_blocks, block_name, self._of_embeddings.get(name, {UNKNOWN}))
        return is_own

    def _hold(
        self,
        known: dict[Hashable, set[AdapterKey]] | dict[str, set[AdapterKey]],
        name: Any,
        new: set[AdapterKey],
    ) -> bool:
        keys = known.get(name)
        if keys is None:
            if len(known) >= MAX_OWN_NAMES:
                return False
            keys = known[name] = set()
        keys |= new
        if len(keys) > MAX_KEYS_OF_NAME:
            known[name] = keys = {UNKNOWN}
        contents = {self._content(key) for key in keys}
        return len(contents) == 1 and None not in contents

    def _content(self, key: AdapterKey) -> bytes | None:
        if key == NO_ADAPTER:
            return b""
        digest = self._digests.known(key.adapter_id, key.path)
        return None if digest is None else digest + key.how_read

    def replaced(self, adapter_id: int) -> None:
        """Note that the content under an id is another from now on, also in requests that run."""
        for known in (self._of_blocks, self._of_embeddings):
            for keys in known.values():
                if any(key.adapter_id == adapter_id for key in keys):
                    keys.add(UNKNOWN)

    def blocks_were_reset(self) -> None:
        """Forget all blocks: the engine's own prefix cache holds nothing."""
        self._of_blocks.clear()

    def embeddings_were_reset(self) -> None:
        """Forget all embeddings: the engine's encoder cache holds nothing."""
        self._of_embeddings.clear()


class RequestReader:
    """Makes the pool's views of vLLM's requests. Scheduler's thread.

    Args:
        media_are_named: vLLM names media by content; False if it numbers them.
        has_own_cache: vLLM's own prefix cache is on.
        has_adapters: vLLM takes LoRA adapters.
        adapts_encoders: LoRA adapters change the encoders of media, too.
        defects: computations of this engine that vLLM is known to get wrong.
        on_replaced: called when an adapter is loaded in place, or will be read again.
    """

    def __init__(
        self,
        registry: MetricsRegistry,
        *,
        media_are_named: bool,
        defects: Sequence[compat.Defect] = (),
        has_own_cache: bool = True,
        has_adapters: bool = True,
        adapts_encoders: bool = False,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._on_replaced = on_replaced
        self._read_again: set[int] = set()  # ids of adapters
        self._saves_base = all(defect.saves_base for defect in defects)
        self._saves_adapters = all(defect.saves_adapters for defect in defects)
        # Read by the views.
        self.adapters = AdapterDigests()
        self.caches = OwnCaches(self.adapters)
        self.defects = defects
        self.media_are_shared = media_are_named and all(each.shares_media for each in defects)
        self.has_own_cache = has_own_cache
        self.has_adapters = has_adapters
        self.adapts_encoders = adapts_encoders
        self.media_releases = compat.media_releases()
        self.trusts_hits = True  # no request has come after which hits may be another's

    def own_cache_was_reset(self) -> None:
        """Forget all blocks: the engine's own prefix cache holds nothing."""
        self.caches.blocks_were_reset()

    def encoder_cache_was_reset(self) -> None:
        """Forget all embeddings: the engine's encoder cache holds nothing."""
        self.caches.embeddings_were_reset()

    def adapter_loaded(self, adapter_id: int, path: str, *, in_place: bool) -> None:
        """Note that vLLM was told to load an adapter."""
        self.adapters.loaded(adapter_id, path, in_place=in_place)
        if in_place:
            self.caches.replaced(adapter_id)
            self._on_replaced()

    def adapter_removed(self, adapter_id: int) -> None:
        """Note that vLLM was told to remove an adapter."""
        self.adapters.removed(adapter_id)

    def _note_read_again(self, lora: "LoRARequest") -> None:
        """Note where vLLM begins to read an adapter's files again and again.

        It does at every step that has a request with `load_inplace`, for all requests with that
        adapter: the files may change while they run.
        """
        if not lora.load_inplace or lora.lora_int_id in self._read_again:
            return
        logger.warning(
            "kvpool: the LoRA adapter %s is used with load_inplace, so vLLM reads its files at "
            "every step, and they may change within a request: its requests are loaded and not "
            "saved; load it under another name, without load_inplace, to save them",
            lora.lora_name,
        )
        if len(self._read_again) < MAX_ADAPTERS:
            self._read_again.add(lora.lora_int_id)
        self.caches.replaced(lora.lora_int_id)
        self._on_replaced()

    def read(self, request: "Request") -> "VllmRequest":
        """Return the view of a request that has arrived."""
        options = self._options(request)
        if (lora := request.lora_request) is not None:
            self._note_read_again(lora)
            self.adapters.loaded(lora.lora_int_id, lora.lora_path, in_place=lora.load_inplace)
        is_read_again = lora is not None and self._is_read_again(lora)
        saves = self._saves_base if lora is None else self._saves_adapters and not is_read_again
        if not saves:
            options = replace(options, save=False)
        if not all(each.trusts_later_hits(request) for each in self.defects):
            self.trusts_hits = False
        return VllmRequest(request, options, self, is_read_again)

    def _is_read_again(self, lora: "LoRARequest") -> bool:
        return (
            lora.load_inplace
            or lora.lora_int_id in self._read_again
            or len(self._read_again) >= MAX_ADAPTERS  # which others are is not known
        )

    def _options(self, request: "Request") -> RequestOptions:
        try:
            return read_request_options(request.kv_transfer_params)
        except ConfigError as error:
            # The request is served nevertheless. vLLM and other connectors, too, take them for an
            # object, and a client's `vllm_xargs` can make them another value.
            if not isinstance(request.kv_transfer_params, Mapping):
                request.kv_transfer_params = None
            self._registry.add("kvpool_failures", kind="request_options")
            logger.warning(
                "kvpool: request %s: %s; it is loaded by default and not saved",
                request.request_id,
                error,
            )
            return OPTIONS_NOT_READ


class VllmRequest:
    """A `RequestView` of vLLM's Request."""

    def __init__(
        self,
        request: "Request",
        options: RequestOptions,
        reader: RequestReader,
        is_read_again: bool,
    ) -> None:
        self._reader = reader
        self._is_read_again = is_read_again
        self._adapts_encoders = reader.adapts_encoders and request.lora_request is not None
        self._request = request
        self.request_id: str = request.request_id
        self.options = options
        self.reads_cache = not request.skip_reading_prefix_cache
        media_are_shared = reader.media_are_shared and not any(
            compat.is_number(self._name_of(feature)) for feature in request.mm_features
        )
        self.tenant = options.tenant or tenant_of(request.cache_salt or "")
        self.reads_files = request.lora_request is not None
        self.has_media = bool(request.mm_features)
        # A streaming request rewrites its tokens in place.
        self.shareable = not request.resumable and (media_are_shared or not request.mm_features)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, without output."""
        return int(self._request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output so far, without drafts."""
        return int(self._request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the engine's blocks."""
        return int(self._request.num_computed_tokens)

    @property
    def num_preemptions(self) -> int:
        """Number of times that vLLM has preempted the request."""
        return int(self._request.num_preemptions)

    def tokens(self) -> Sequence[int]:
        """Return all known tokens, as the prompt's own list if it has all: a list hashes faster."""
        request = self._request
        prompt: list[int] | None = request.prompt_token_ids
        if prompt is not None and request.prompt_embeds is None and len(prompt) == self.num_tokens:
            return prompt
        tokens: Sequence[int] = request.all_token_ids
        return tokens

    def identity(self) -> RequestIdentity | None:
        """Return all that shapes this request's KV besides its tokens; see `RequestView`.

        Raises OSError.
        """
        request = self._request
        adapter = b""
        if (lora := request.lora_request) is not None:
            digest = self._reader.adapters.of(lora.lora_int_id, lora.lora_path, lora.load_inplace)
            adapter = digest + _how_read(lora)
        media = tuple(
            MediaItem(
                self._name_of(f),
                f.mm_position.offset,
                f.mm_position.offset + f.mm_position.length,
                self._reader.media_releases,
            )
            for f in request.mm_features
        )
        return RequestIdentity(adapter, request.cache_salt or "", media, _embed_rows(request))

    def admit(self) -> OwnKV:
        """Note whose KV and embeddings the engine's own caches will hold; see `RequestView`."""
        reader, request = self._reader, self._request
        blocks = reader.trusts_hits and all(each.trusts_hits(request) for each in reader.defects)
        embeddings = True
        name = compat.own_adapter_name(request) if reader.has_adapters else None
        if name is not None:
            key = self._adapter_key()
            if self._adapts_encoders and request.mm_features:
                lora_name = request.lora_request.lora_name
                embeddings = reader.caches.hold_embeddings(lora_name, name, key)
            blocks &= reader.caches.hold_blocks(name, key)
        return OwnKV(blocks or not reader.has_own_cache, embeddings)

    def _adapter_key(self) -> AdapterKey:
        lora = self._request.lora_request
        if lora is None:
            return NO_ADAPTER
        if self._is_read_again:
            return UNKNOWN
        return AdapterKey(lora.lora_int_id, lora.lora_path, _how_read(lora))

    def _name_of(self, feature: Any) -> str:
        """Return vLLM's identifier of a medium, without the name of an adapter that changes it.

        The adapter counts by content.
        """
        identifier = str(feature.identifier)
        if not self._adapts_encoders:
            return identifier
        return identifier.removeprefix(f"{self._request.lora_request.lora_name}:")

    def keep_state_at(self, boundary: int) -> None:
        """Have vLLM keep the state after so many tokens; see `RequestView`.

        It keeps, and offers, one as the end of a prefix that requests have in common.
        """
        self._request.shared_prefix_boundary = boundary

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """The client's W3C trace headers; None without tracing."""
        return self._request.trace_headers or None

    def record_span(self, name: str, seconds: float, attributes: Mapping[str, int | str]) -> None:
        """Record a span that ends now, below the client's trace."""
        record_span(self.trace_headers, name, seconds, attributes)


LORA_LEFT_OUT = {
    "lora_name": "a name",
    "lora_int_id": "a name; content under it is known by the files' times",
    "lora_path": "the files count by content",
    "base_model_name": "a name",
    "load_inplace": "says when the files are read",
}
"""Fields of vLLM's LoRARequest that do not change what its files mean; all others count."""


def _how_read(lora: "LoRARequest") -> bytes:
    """Return how an adapter's request has its files read; empty if all fields are default."""
    said = {
        name: value
        for name in lora.__struct_fields__
        if name not in LORA_LEFT_OUT and (value := getattr(lora, name))
    }
    return encoded(canonical(said)) if said else b""


def _embed_rows(request: "Request") -> tuple[bytes, ...] | None:
    embeds = request.prompt_embeds
    if embeds is None:
        return None
    is_token = request.prompt_is_token_ids or [False] * embeds.shape[0]
    rows = embeds.contiguous().cpu().view(torch.uint8).numpy()
    return tuple(
        b"" if token else hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        for token, row in zip(is_token, rows, strict=True)
    )
