"""vLLM's objects as the embedding connector's values, and its statistics as vLLM's."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
    from vllm.distributed.ec_transfer.ec_connector.utils import (
        PlaceholderMetadataResolver,
        collect_ec_item_metadata,
    )
except ImportError as error:
    raise ImportError(
        "KVPoolECConnector needs vLLM 0.32 or newer: earlier releases have no hook for embeddings "
        "that are unavailable, and none after the model is loaded; KVPoolConnector works"
    ) from error

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.request import RequestStatus

from vllm_kvpool.config import MAX_ITEM_NAME, EmbedsConfig
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.network.allowed_peers import ANY_HOSTS, MAX_PORT
from vllm_kvpool.storage.contents.manifest import shown
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.identity.factors import LEFT_OUT_OF_EMBEDDINGS, canonical, encoded
from vllm_kvpool.vllm_adapt.identity.namespace import model_values
from vllm_kvpool.vllm_adapt.stats import TableProm, TableStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

FINGERPRINT_BYTES = 16
LOOPBACK = "127.0.0.1"


class Endpoints(NamedTuple):
    """Endpoints of one engine, by rank."""

    listen: tuple[str, ...]
    advertised: tuple[str, ...]
    local: tuple[str, ...]
    """For the engine's own scheduler."""
    host: str


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """Return `ec_connector_extra_config` as the user wrote it."""
    assert vllm_config.ec_transfer_config is not None
    return vllm_config.ec_transfer_config.ec_connector_extra_config or {}


def check_model(vllm_config: "VllmConfig") -> None:
    """Refuse models whose embeddings cannot be exchanged, and adapters of encoders.

    vLLM names what such an encoder encodes by the adapter's name alone.

    Raises ConfigError.
    """
    if vllm_config.model_config.is_encoder_decoder:
        raise ConfigError(
            "embeddings of encoder-decoder models (Whisper) are not exchanged: vLLM takes what its "
            "decoder attends to from its own encoder alone; start without KVPoolECConnector"
        )
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        raise ConfigError(
            "embeddings are not exchanged with enable_tower_connector_lora: adapters then change "
            "them, and vLLM identifies the result by the adapter's name, whatever its content; "
            "start without that option, or without KVPoolECConnector"
        )


def warn_of_numbers(vllm_config: "VllmConfig") -> None:
    """Log where media have no names that another engine knows."""
    if not compat.names_media(vllm_config):
        logger.warning(
            "kvpool: embeddings of media without multi_modal_uuids are not exchanged: with neither "
            "prefix caching nor a cache of processed media vLLM numbers media; leave out "
            "--no-enable-prefix-caching, or --mm-processor-cache-gb 0"
        )


def endpoints_of(vllm_config: "VllmConfig", config: EmbedsConfig) -> Endpoints:
    """Return the endpoints; ports run over ranks, then over data-parallel engines.

    Raises ConfigError if ports run out.
    """
    transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    host, port = str(transfer.ec_ip), int(transfer.ec_port)
    if config.listen:
        host, _, text = config.listen.removeprefix("tcp://").rpartition(":")
        port = int(text)
    ranks = parallel.tensor_parallel_size
    first = port + parallel.data_parallel_index * ranks
    if not 0 < first <= first + ranks - 1 <= MAX_PORT:
        raise ConfigError(
            f"the {ranks} ranks of this engine would listen at ports {first} to "
            f"{first + ranks - 1}; choose another ec_port, or listen"
        )
    is_any = host in ANY_HOSTS
    shown = config.advertise or (LOOPBACK if is_any else host)
    if is_any and not config.advertise:
        logger.warning(
            "kvpool: embeddings listen at %s and no advertise says where peers reach this "
            "engine: only those of this machine can",
            host,
        )

    def each_rank(name: str) -> tuple[str, ...]:
        return tuple(f"tcp://{name}:{first + rank}" for rank in range(ranks))

    return Endpoints(
        each_rank("*" if is_any and host != "[::]" else host),
        each_rank(shown),
        each_rank(LOOPBACK if is_any else host),
        shown.strip("[]"),
    )


def base_fingerprint(vllm_config: "VllmConfig", config: EmbedsConfig) -> str:
    """Return the digest of what decides an encoder's output for given media, but for later updates.

    Reads the model's files, a sample of its weights among them. Raises OSError.
    """
    hf = compat.configuration(vllm_config.model_config)
    values = {
        "model_type": hf.model_type,
        "parts": {
            name: canonical(_plain(value))
            for name in ("vision_config", "audio_config", "text_config", "thinker_config")
            if (value := getattr(hf, name, None)) is not None
        },
        **model_values(vllm_config, config.weights_id, config.namespace, LEFT_OUT_OF_EMBEDDINGS),
        "media_releases": compat.media_releases(),
    }
    logger.debug("kvpool: embeddings' fingerprint of %s", shown(values))
    return hashlib.blake2b(encoded(values), digest_size=FINGERPRINT_BYTES).hexdigest()


def broadcast_from_first_rank(make: Callable[[], str]) -> str:
    """Return the result of `make` in the first rank of this tensor-parallel group.

    Every rank calls this. Raises what `make` raises, in every rank.
    """
    group = get_tp_group()
    made: Any = None
    if group.rank_in_group == 0:
        try:
            made = make()
        except Exception as error:
            made = error
    received = group.broadcast_object(made, src=0)
    if isinstance(received, Exception):
        raise received
    return str(received)


_SHAPES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "depth"),
    *("num_attention_heads", "image_size", "patch_size", "spatial_merge_size", "embed_dim"),
    *("deepstack_visual_indexes", "d_model", "encoder_layers", "num_mel_bins"),
)


def _plain(part: Any) -> dict[str, Any]:
    """Return a few values of a part's configuration: all of it differs between releases."""
    return {name: getattr(part, name) for name in _SHAPES if hasattr(part, name)}


def fingerprint_with(base: str, weights_version: str) -> str:
    """Return the fingerprint with this version of the weights.

    With the first one it is the base.
    """
    if not weights_version:
        return base
    named = f"{base}/{weights_version}".encode()
    return hashlib.blake2b(named, digest_size=FINGERPRINT_BYTES).hexdigest()


def metadata_resolver(vllm_config: "VllmConfig") -> PlaceholderMetadataResolver:
    """Return a resolver of fields of items' data that only say where an item belongs."""
    return PlaceholderMetadataResolver(vllm_config.model_config)


def is_name(identifier: str) -> bool:
    """Return True if every engine uses this identifier for the item, and a message can hold it."""
    return not compat.is_number(identifier) and len(identifier) <= MAX_ITEM_NAME


def features_of(
    request: "Request", resolver: PlaceholderMetadataResolver
) -> Iterator[tuple[str, int, int, int, bool, bool]]:
    """Yield a request's items in order, each with six values.

    They are: name, [start, end) in the prompt, rows, True if the media are here, True if the name
    is the same in other engines.
    """
    for feature in request.mm_features:
        yield (
            feature.identifier,
            feature.mm_position.offset,
            feature.mm_position.offset + feature.mm_position.length,
            feature.mm_position.get_num_embeds(),
            _has_media(feature, resolver),
            is_name(feature.identifier),
        )


def _has_media(feature: Any, resolver: PlaceholderMetadataResolver) -> bool:
    """Return True if a feature has more than a proxy's metadata of media that are elsewhere."""
    if not feature.data:
        return False
    said = resolver.fields_for(feature.modality)
    return any(each.data is not None for name, each in feature.data.items() if name not in said)


def on_device(tensor: Any, vllm_config: "VllmConfig") -> Any:
    """Return a host tensor where the model's are, in stream order; itself on a CPU."""
    device = vllm_config.device_config.device
    if device is None or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def is_started(request: "Request") -> bool:
    """Return True if a request holds blocks, and maybe a part of the encoder cache.

    Requests also wait with blocks: after a load of KV, or for a session's next input.
    """
    is_running = request.status == RequestStatus.RUNNING
    return bool(is_running or request.num_computed_tokens > 0)


def max_step_tokens(vllm_config: "VllmConfig") -> int:
    """Return the most tokens whose items a request may need in a step."""
    # A drafter with several modules reads tokens behind those of the step.
    ahead: int = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    return int(vllm_config.scheduler_config.max_num_batched_tokens) + ahead


def transfer_params(request: "Request") -> Mapping[str, Any] | None:
    """Return `ec_transfer_params` as the client or proxy sent it."""
    params: Mapping[str, Any] | None = request.ec_transfer_params
    return params


def answer_of(
    request: "Request",
    resolver: PlaceholderMetadataResolver,
    endpoint: str,
    transfer_ids: Mapping[str, str],
) -> dict[str, Any] | None:
    """Return an encoder's parameters about a finished request's items, for the next engine."""
    items = collect_ec_item_metadata(request.mm_features, resolver)
    for feature in request.mm_features:
        if not is_name(feature.identifier):
            items.pop(feature.identifier, None)
            continue
        entry = items[feature.identifier]
        entry["peer"] = endpoint
        entry["rows"] = feature.mm_position.get_num_embeds()
        if feature.identifier in transfer_ids:
            entry["transfer_id"] = transfer_ids[feature.identifier]
    return items or None


@dataclass
class EmbedsStats(TableStats, ECConnectorStats):
    """`data` is sample name -> value, as of the KV connector."""


class EmbedsProm(TableProm, ECConnectorPromMetrics):
    """The embedding connector's rows."""

    of_embeds = True
