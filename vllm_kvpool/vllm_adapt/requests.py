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
from vllm_kvpool.identity.chunk_hash import EmbedRows, MediaItem, RequestIdentity, tenant_of
from vllm_kvpool.identity.weights import FileState, adapter_stamp, digest_adapter
from vllm_kvpool.metrics import MetricsRegistry
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

NO_ADAPTER = b""  # a digest that no adapter has


class AdapterDigests:
    """Content digests of LoRA adapters as they were when this engine first met them, by a
    request or because it was told to load them.

    Owned by the thread that reads adapters. Keyed by the adapter's id too: another content at the
    same path comes with another id, or says `load_inplace`. An adapter whose files have changed
    since has no digest: the engine keeps the old weights in memory, until it lets them go for want
    of places (`max_cpu_loras`) or by `remove_lora`, and then reads the new ones under the same id.
    Nor has one whose id another has had: the engine computes with what it has under that id.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Adapter] = {}
        self._path_of: dict[int, str] = {}  # of the adapter that vLLM has under an id
        self._of_own_names: dict[Hashable, bytes] = {}
        self._of_embeddings: dict[str, bytes] = {}  # in the encoder cache, by the adapter's name

    def of(self, adapter_id: int, path: str, reload: bool) -> bytes:
        """The digest. The first call reads the adapter's files, later ones check that they have not
        changed. Raises OSError."""
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
        """vLLM is told of an adapter, by a request or to load it: unless `in_place`, it goes on
        with what it has under that id. Scheduler's thread."""
        if in_place or adapter_id not in self._path_of:
            self._path_of[adapter_id] = path
            if len(self._path_of) > MAX_ADAPTERS:
                del self._path_of[next(iter(self._path_of))]

    def removed(self, adapter_id: int) -> None:
        """vLLM has no adapter under that id any more. Scheduler's thread."""
        self._path_of.pop(adapter_id, None)

    def check_own_name(self, own_name: Hashable, adapter: bytes) -> None:
        """OSError if the engine's own prefix cache may hold KV of another adapter that it calls the
        same: blocks that a request finds there would be saved as this adapter's."""
        known = self._of_own_names.get(own_name)
        if known is None:
            # None may be forgotten: blocks of any of them may be in that cache.
            if len(self._of_own_names) >= MAX_OWN_NAMES:
                raise OSError(
                    f"LoRA adapter {own_name}: {MAX_OWN_NAMES} others have been used since the "
                    "engine's own prefix cache was reset, and are remembered; reset it "
                    "(reset_prefix_cache) to share this one"
                )
            self._of_own_names[own_name] = adapter
        elif known != adapter:
            _forget_whose(self._of_own_names, own_name)
            raise OSError(
                f"the engine's own prefix cache has KV of another LoRA adapter under {own_name}; "
                "reset it (reset_prefix_cache), or load the adapter under another name"
            )

    def check_embeddings(self, name: str, own_name: Hashable, adapter: bytes) -> None:
        """OSError if the engine's encoder cache may hold embeddings that another adapter of this
        name has made. What is computed from them may then be in the engine's own prefix cache, too,
        as this adapter's."""
        known = self._of_embeddings.get(name)
        if known is None and len(self._of_embeddings) < MAX_OWN_NAMES:
            self._of_embeddings[name] = adapter
        elif known != adapter:
            # From now on embeddings, and blocks, of either may be there.
            for of_names, each in ((self._of_embeddings, name), (self._of_own_names, own_name)):
                _forget_whose(of_names, each)
            raise OSError(
                "whether the engine's encoder cache has embeddings of another LoRA adapter under "
                f"the name {name} is not known; reset it (reset_encoder_cache) and then the prefix "
                "cache (reset_prefix_cache), or load the adapter under another name"
            )

    def own_cache_was_reset(self) -> None:
        """The engine's own prefix cache holds nothing. Scheduler's thread."""
        self._of_own_names.clear()

    def encoder_cache_was_reset(self) -> None:
        """The engine's encoder cache holds nothing. Scheduler's thread."""
        self._of_embeddings.clear()


def _forget_whose(adapters: dict[Any, bytes], name: Hashable) -> None:
    """What is called so may be of several adapters: no adapter is equal to it."""
    if name in adapters or len(adapters) < MAX_OWN_NAMES:
        adapters[name] = NO_ADAPTER


def _changed(path: str) -> OSError:
    return OSError(
        f"the files of the LoRA adapter {path} have changed since it was first used, and whether "
        "the engine has the old or the new ones is not known; load it under another name"
    )


class _Adapter(NamedTuple):
    directory: Path
    stamp: tuple[FileState, ...]
    digest: bytes


class RequestReader:
    """Makes the pool's views of vLLM's requests. Scheduler's thread.

    `media_are_named` is False where vLLM numbers media instead of naming them, `has_own_cache`
    where it has no prefix cache of its own, and `adapts_encoders` where LoRA adapters leave the
    encoders of media alone. `defects`: what it computes wrongly.
    `on_replaced`: called when an adapter is loaded in place, or read again from now on.
    """

    def __init__(
        self,
        registry: MetricsRegistry,
        *,
        media_are_named: bool,
        defects: Sequence[compat.Defect] = (),
        has_own_cache: bool = True,
        adapts_encoders: bool = False,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._on_replaced = on_replaced
        self._adapters = AdapterDigests()
        self._read_again: set[int] = set()  # ids of adapters
        self._media_are_shared = media_are_named and all(each.shares_media for each in defects)
        self._saves_base = all(defect.saves_base for defect in defects)
        self._saves_adapters = all(defect.saves_adapters for defect in defects)
        self._has_own_cache = has_own_cache
        self._adapts_encoders = adapts_encoders

    def own_cache_was_reset(self) -> None:
        """The engine's own prefix cache holds nothing."""
        self._adapters.own_cache_was_reset()

    def encoder_cache_was_reset(self) -> None:
        """The engine's encoder cache holds nothing."""
        self._adapters.encoder_cache_was_reset()

    def adapter_loaded(self, adapter_id: int, path: str, *, in_place: bool) -> None:
        """vLLM was told to load an adapter."""
        self._adapters.loaded(adapter_id, path, in_place=in_place)
        if in_place:
            self._on_replaced()

    def adapter_removed(self, adapter_id: int) -> None:
        """vLLM was told to remove an adapter."""
        self._adapters.removed(adapter_id)

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
        self._on_replaced()

    def read(self, request: "Request") -> "VllmRequest":
        """The view of a request that has arrived."""
        options = self._options(request)
        if (lora := request.lora_request) is not None:
            self._note_read_again(lora)
            self._adapters.loaded(lora.lora_int_id, lora.lora_path, in_place=lora.load_inplace)
        if not self._saves(lora):
            options = replace(options, save=False)
        return VllmRequest(
            request,
            options,
            self._adapters,
            self._media_are_shared,
            self._has_own_cache,
            self._adapts_encoders,
        )

    def _saves(self, lora: "LoRARequest | None") -> bool:
        if lora is None:
            return self._saves_base
        is_read_again = (
            lora.load_inplace
            or lora.lora_int_id in self._read_again
            or len(self._read_again) >= MAX_ADAPTERS  # which others are is not known
        )
        return self._saves_adapters and not is_read_again

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
        adapters: AdapterDigests,
        media_are_shared: bool,
        has_own_cache: bool = True,
        adapts_encoders: bool = False,
    ) -> None:
        self._has_own_cache = has_own_cache
        self._adapts_encoders = adapts_encoders and request.lora_request is not None
        self._request = request
        self._adapters = adapters
        self.request_id: str = request.request_id
        self.options = options
        self.reads_cache = not request.skip_reading_prefix_cache
        media_are_shared = media_are_shared and not any(
            compat.is_number(self._name_of(feature)) for feature in request.mm_features
        )
        self.tenant = options.tenant or tenant_of(request.cache_salt or "")
        self.reads_files = request.lora_request is not None
        self.has_media = bool(request.mm_features)
        # A streaming request rewrites its tokens in place.
        self.shareable = not request.resumable and (media_are_shared or not request.mm_features)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def num_preemptions(self) -> int:
        return int(self._request.num_preemptions)

    def tokens(self) -> Sequence[int]:
        """All known tokens. The prompt's own list while there are no others: it hashes faster."""
        request = self._request
        prompt: list[int] | None = request.prompt_token_ids
        if prompt is not None and request.prompt_embeds is None and len(prompt) == self.num_tokens:
            return prompt
        tokens: Sequence[int] = request.all_token_ids
        return tokens

    def identity(self) -> RequestIdentity | None:
        """What shapes this request's KV besides its tokens. Raises OSError; see `RequestView`."""
        request = self._request
        adapter = b""
        if (lora := request.lora_request) is not None:
            adapter = self._adapters.of(lora.lora_int_id, lora.lora_path, lora.load_inplace)
            adapter += _how_read(lora)
            own_name = compat.own_adapter_name(request)
            if self._adapts_encoders and request.mm_features:
                self._adapters.check_embeddings(lora.lora_name, own_name, adapter)
            if self._has_own_cache:
                self._adapters.check_own_name(own_name, adapter)
        media = tuple(
            MediaItem(
                self._name_of(f),
                f.mm_position.offset,
                f.mm_position.offset + f.mm_position.length,
            )
            for f in request.mm_features
        )
        return RequestIdentity(adapter, request.cache_salt or "", media, _embed_rows(request))

    def _name_of(self, feature: Any) -> str:
        """vLLM's identifier of a medium, without the name of an adapter that changes its embedding:
        the adapter counts by content."""
        identifier = str(feature.identifier)
        if not self._adapts_encoders:
            return identifier
        return identifier.removeprefix(f"{self._request.lora_request.lora_name}:")

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        return self._request.trace_headers or None

    def record_span(self, name: str, seconds: float, attributes: Mapping[str, int | str]) -> None:
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
    """How an adapter's files are read, by its request; empty if all fields are default."""
    said = {
        name: value
        for name in lora.__struct_fields__
        if name not in LORA_LEFT_OUT and (value := getattr(lora, name))
    }
    return encoded(canonical(said)) if said else b""


def _embed_rows(request: "Request") -> EmbedRows | None:
    embeds = request.prompt_embeds
    if embeds is None:
        return None
    is_token = request.prompt_is_token_ids or [False] * embeds.shape[0]
    rows = embeds.contiguous().cpu().view(torch.uint8).numpy()
    return EmbedRows(
        tuple(
            b"" if token else hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            for token, row in zip(is_token, rows, strict=True)
        )
    )
