"""Differences between releases of vLLM (0.23 to 0.33), and vLLM's own wrong computations.

No other module knows releases. A feature is looked for by its name in vLLM, not by a version. So
other releases work as long as they have the names. `EQUAL_RELEASES` alone names versions: an engine
of any other release shares with its own release. `DEFECTS` has the combinations that vLLM is
known to compute wrongly; docs/failures.md and tests have the same rows.
"""

import functools
import inspect
import math
import platform
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


EQUAL_RELEASES = frozenset(
    (
        *("0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0"),
        *("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    )
)
"""Releases that compute the same KV of text from the same options, and whose defaults of options
that count mean the same; media count every release (`media_releases`). A release is added after its
defaults were compared and its namespaces were found equal (`tests/vllm_adapt/identity`)."""
_BUILD = re.compile(r"\+(cpu|cu|empty|precompiled|rocm|tpu|xpu)[\w.]*")  # what vLLM's setup.py adds

MOST_FRAMES = 24
LOOK_MS = 5
"""A worker looks again after so long: ZeroMQ may drop the second of two wake-ups within 3 ms."""
_WAIT_NAMES = ("last_read", "busy_loop_s", "poller")
_A = TypeVar("_A")
ENGINE = "EngineCore"  # vLLM's class of engines, whether or not in a process of their own

_TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


def callers() -> Iterator[Any]:
    """Yield `self` of the methods that have called this one's caller, the nearest first.

    vLLM gives connectors no reference to its own objects.
    """
    frame = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        yield frame.f_locals.get("self")
        if frame.f_back is None:
            return
        frame = frame.f_back


def is_in_process() -> bool:
    """Return True if an engine runs in its caller's process and makes no step when idle."""
    return not environment_variables()["VLLM_ENABLE_V1_MULTIPROCESSING"]()


def watch_arrivals(on_arrival: Callable[[], None]) -> Callable[[], bool] | None:
    """Call `on_arrival` for all that the calling engine is sent: requests, aborts, calls.

    Returns whether anything waits that the engine has not taken yet; None for an engine in its
    caller's process, to which nothing comes. `on_arrival` runs on the thread that puts, which holds
    the lock of the engine's queue.
    """
    core = next(filter(_is_engine, callers()), None)
    inbox = getattr(core, "input_queue", None)
    if inbox is None:
        return None
    put = inbox._put  # what `queue.Queue` calls for each item

    def notify(item: Any) -> None:
        put(item)
        on_arrival()

    inbox._put = notify
    return lambda: bool(inbox.queue)


def polling_end() -> Callable[[], None]:
    """Return a call that lets the calling worker's process sleep until its next step.

    A worker of vLLM polls for a second after each step, whether or not it has computed anything.
    After the call it sleeps until it is woken. The next step starts a second of polling again; the
    dummy passes of data parallelism are such steps. With vLLM's own extension
    (VLLM_USE_SPINLOOP_EXT) the worker polls for 0.1 s more.

    The call does nothing in an engine without worker processes. Nor does it in a release that lacks
    one of the names used here, or that takes no second look after a lost wake-up.
    """
    queues = (getattr(caller, "rpc_broadcast_mq", None) for caller in callers())
    reader: Any = getattr(next(filter(None, queues), None), "_spin_condition", None)
    if not all(hasattr(reader, name) for name in _WAIT_NAMES):
        return lambda: None
    if not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        return lambda: None
    wake_ups = reader.poller = _WakeUps(reader.poller)

    def end_polling() -> None:
        reader.last_read = -math.inf
        wake_ups.looks_soon = True

    return end_polling


class _WakeUps:
    """A wrapper of vLLM's poller, which looks again `LOOK_MS` after a wake-up or an idle step.

    vLLM looks for a step before each wait. ZeroMQ may drop a step's wake-up in two cases. Either an
    earlier wake-up has not left the engine; it wakes the worker later. Or the engine has sent or
    dropped one in the last 3 ms, and the last one sent had not left then. The worker has taken that
    one since and sleeps for `LOOK_MS`; the step is written by the end of this sleep, and vLLM's
    next look finds it. No part of this depends on where a process is paused.
    """

    def __init__(self, poller: Any) -> None:
        self._poller = poller
        self.looks_soon = True

    def poll(self, timeout: int | None = None) -> Any:
        """Wait for wake-ups; return sockets and events as `zmq.Poller.poll`. `timeout`: in ms."""
        if self.looks_soon:
            timeout = min(LOOK_MS, LOOK_MS if timeout is None else timeout)
        found = self._poller.poll(timeout)
        self.looks_soon = bool(found)
        return found


def engine_began_ns() -> int | None:
    """Return when the calling engine began, by the wall clock: before it read any weights.

    vLLM names an engine's configuration by the time at which it is made. None without an engine.
    """
    core = next(filter(_is_engine, callers()), None)
    named = "" if core is None else str(core.vllm_config.instance_id)
    return int(named) if named.isdecimal() else None


def ask_workers(question: Callable[[Any], _A], timeout_s: float) -> list[_A]:
    """Call a function in each worker of the calling engine and return the answers by rank.

    Goes over vLLM's own connections, on any host. The engine has no step yet.
    """
    core = next(filter(_is_engine, callers()))
    answers: list[_A] = core.model_executor.collective_rpc(question, timeout=timeout_s)
    return answers


def _is_engine(caller: Any) -> bool:
    return any(base.__name__ == ENGINE for base in type(caller).__mro__)


def host_address() -> str:
    """Return the address at which vLLM has this host's processes reached (`VLLM_HOST_IP`).

    It is the loopback address where there is none.
    """
    from vllm.utils.network_utils import get_ip

    found = get_ip()
    return "127.0.0.1" if found == "0.0.0.0" else str(found)


def configuration(model: Any) -> Any:
    """Return the model's configuration (transformers') as vLLM reads it.

    `model`: vLLM's `ModelConfig`.
    Some models write into the configuration of the engine when they are built (DeepSeek V2 another
    kind of rope). That is seen where scheduler and model are one process (TP 1) and nowhere else,
    so it is read anew. Where it cannot be, the engine's own is taken.
    """
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides
    named = overrides if isinstance(overrides, dict) else {}
    nested = {name: value for name, value in named.items() if isinstance(value, dict)}
    try:
        found = get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            getattr(model, "_hf_config_revision", None) or model.revision,
            model.code_revision,
            model.config_format,
            hf_overrides_kw={name: each for name, each in named.items() if name not in nested},
            hf_overrides_fn=overrides if callable(overrides) else None,
            token=model.hf_token,
        )
    except (OSError, ValueError):
        return model.hf_config
    if nested:
        model._apply_dict_overrides(found, nested)
    return found


def built_max_model_len(model: Any) -> int:
    """Return the `max_model_len` that the model was built with. `model`: vLLM's `ModelConfig`.

    Where it is "auto" (-1), vLLM lowers it afterwards to what the KV cache has room for.
    """
    is_fitted = model.original_max_model_len == -1
    return int(model.get_and_verify_max_len(-1) if is_fitted else model.max_model_len)


def interleave(parallel: Any) -> int:
    """Return the tokens in turn that a rank of decode context parallelism holds.

    `parallel` is vLLM's. vLLM 0.32 lets the older option override the newer one in its workers
    alone.
    """
    older = int(parallel.dcp_kv_cache_interleave_size)
    return older if older > 1 else int(parallel.cp_kv_cache_interleave_size)


def is_interleaved_for_nixl(parallel: Any, transfer: Any) -> bool:
    """Return True if only workers deal tokens out by blocks, as NIXL needs it.

    `transfer`: the engine's `KVTransferConfig`.
    """
    is_open = getattr(parallel, "_allow_auto_resolve_cp_interleave_size", False)
    return bool(is_open and transfer is not None and transfer.has_connector("NixlConnector"))


def text_part(read: Any) -> Any:
    """Return the part of a `configuration` that describes the language model."""
    from vllm.transformers_utils.config import get_hf_text_config

    return get_hf_text_config(read)


def yarn_reading(rope: Mapping[str, Any], *, is_latent: bool) -> dict[str, float]:
    """Return this release's reading of YaRN's fields, where `factor` alone says something else.

    `scale`: what queries and keys are multiplied by; `extrapolation`: the weight of the
    frequencies that stay. `rope`: of a model's configuration; `is_latent`: of one with MLA, whose
    rope vLLM makes DeepSeek's own, and `scale` is beside that one's. vLLM 0.32 reads
    `attention_factor`, `mscale` and `mscale_all_dim`, older releases read others.
    """
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
        YaRNScalingRotaryEmbedding,
    )

    if (rope.get("rope_type") or rope.get("type")) != "yarn":
        return {}
    read = {
        name: rope[name]
        for name in inspect.signature(YaRNScalingRotaryEmbedding).parameters
        if rope.get(name) is not None
    }
    reading: dict[str, float] = {}
    if read.get("extrapolation_factor", 1) != 1:
        reading["extrapolation"] = float(read["extrapolation_factor"])
    factor, attn_factor = float(rope["factor"]), float(read.get("attn_factor", 1))
    usual = _yarn_scale_of(factor)
    if is_latent:
        is_plain = read.get("attention_factor") == 1 or not read.get("apply_yarn_scaling", True)
        if is_plain or attn_factor != 1:
            reading["scale"] = attn_factor
        return reading
    if "attention_factor" in read:
        scale = float(read["attention_factor"])
    elif read.get("mscale") and read.get("mscale_all_dim"):
        scale = _yarn_scale_of(factor, read["mscale"]) / _yarn_scale_of(
            factor, read["mscale_all_dim"]
        )
    else:
        is_scaled = read.get("apply_yarn_scaling", True) or "mrope_section" in rope
        scale = (usual if is_scaled else 1.0) * attn_factor
    if not math.isclose(scale, usual):
        reading["scale"] = scale
    return reading


def _yarn_scale_of(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def kv_heads_of_layer(model: Any, layer: int) -> int:
    """Return the KV heads of one layer of the whole model.

    The result is 0 where its configuration does not say it.
    `model`: vLLM's `ModelConfig`.
    """
    shape = model.model_arch_config
    differing = getattr(shape, "per_layer_overrides", None) or ()
    return int(shape[layer].total_num_kv_heads) if layer < len(differing) else 0


def row_bytes(spec: Any) -> int:
    """Return bytes of one token's K and V (or latent) of one head in one layer."""
    content = getattr(spec, "state_content_size_bytes", None)
    if content is not None:
        slots = getattr(spec, "num_head_slots", None) or spec.num_kv_heads
        return int(content) * int(slots) // int(spec.num_kv_heads)
    rows = spec.block_size // getattr(spec, "compress_ratio", 1) * spec.num_kv_heads
    nbytes, rest = divmod(spec.real_page_size_bytes, rows)
    assert rest == 0, spec
    return int(nbytes)


def has_own_content(spec: Any) -> bool:
    """Return True if the backend has its own layout of rows, without K and V apart."""
    return bool(getattr(spec, "state_content_bytes", None))


def packs_heads(spec: Any) -> bool:
    """Return True if the backend keeps several KV heads as one."""
    return getattr(spec, "num_head_slots", None) is not None or bool(spec.kv_quant_mode.is_nvfp4)


def is_plugins_kv_dtype(cache_dtype: str) -> bool:
    """Return True if a plugin of vLLM's has registered this `kv_cache_dtype` (vLLM 0.33)."""
    from vllm.config import cache

    handler_of = getattr(cache, "get_kv_cache_dtype_handler", None)
    return handler_of is not None and handler_of(cache_dtype) is not None


def is_ring(spec: Any) -> bool:
    """Return True if a request's only page is overwritten again and again.

    The page has the inputs of a row of several tokens until the row is complete. Where rows end,
    its content does not count.
    """
    specs = getattr(spec, "kv_cache_specs", {"": spec})
    return all(type(each).__name__ == "CircularBufferSpec" for each in specs.values())


def is_latent(spec: Any) -> bool:
    """Return True if a row is MLA's latent, or another one that all ranks hold."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return isinstance(spec, MLAAttentionSpec) or type(spec).__name__ == "SlidingWindowMLASpec"


def is_indexer(spec: Any) -> bool:
    """Return True if the rows are the keys of a sparse-attention indexer."""
    return getattr(getattr(spec, "cache_role", None), "name", "") == "INDEXER"


def indexer_is_fp4(vllm_config: "VllmConfig") -> bool:
    """Return True if the user asks for four bits for the keys of sparse-attention indexers."""
    return str(getattr(vllm_config.attention_config, "indexer_kv_dtype", "")) == "mxfp4"


def fp8_name() -> str:
    """Return the one-byte number type of the device; some of AMD's have another than others."""
    from vllm.platforms import current_platform

    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def is_rocm() -> bool:
    """Return True if the device is an AMD GPU; torch calls it "cuda", too."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def mixes_nvfp4_scales() -> bool:
    """Return True if NVFP4 pages are written for trtllm's kernels, not for FlashInfer's "fa2".

    The rule is vLLM's.
    """
    from vllm.platforms import current_platform

    return not any(current_platform.is_device_capability_family(f) for f in (80, 90, 120))


def quantising_device() -> str:
    """Return the device, as far as vLLM rounds numbers of few bits differently by it.

    vLLM multiplies weights in FP8 with activations in FP8 on a GPU that can, with 16 bits on
    others; weights in four bits with activations in eight on a CPU with AMX.
    """
    from vllm.platforms import current_platform

    if device_type() == "cpu":
        with_amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
        return f"cpu {platform.machine()}{with_amx}"
    capability = current_platform.get_device_capability()
    version = f" {capability.as_version_str()}" if capability is not None else ""
    return f"{current_platform.device_name}{version}"


def model_class_overrides(model: Any) -> Mapping[str, str]:
    """Return the classes that a model is given by option. `model`: vLLM's `ModelConfig`."""
    return getattr(model, "model_class_overrides", {})  # not in vLLM 0.23


def release_apart() -> str:
    """Return the release of vLLM if it counts in namespaces; "" of `EQUAL_RELEASES`.

    vLLM's own name of a build says for which device it is. Any other suffix counts: a fork's.
    """
    import vllm

    version = str(vllm.__version__)
    return "" if _BUILD.sub("", version) in EQUAL_RELEASES else version


def media_releases() -> str:
    """Name the releases that compute an item's embeddings and positions from its content.

    Releases that share text may encode media differently: vLLM 0.32 normalises pixels in the model
    where older releases have a processor of transformers do it.
    """
    import transformers
    import vllm

    release = _BUILD.sub("", str(vllm.__version__))
    return f"vllm {release}, transformers {transformers.__version__}"


def source_of_random_weights() -> str:
    """Name the source of random weights: the releases, and the device, whose generator it is."""
    import vllm
    from vllm.platforms import current_platform

    return (
        f"vllm {vllm.__version__}, torch {torch.__version__}, {current_platform.get_device_name()}"
    )


def backend_of(vllm_config: "VllmConfig", layer_name: str) -> str:
    """Return the name of a layer's attention backend, on a worker; "" where there is none."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    return "" if layer is None else str(layer.get_attn_backend().get_name())


def value_head_size(spec: Any) -> int:
    """Return the elements of a row of V; as many as of K in older specs.

    A latent has no separate V, which only newer specs say.
    """
    return 0 if is_latent(spec) else int(getattr(spec, "head_size_v", spec.head_size))


def tokens_per_state(spec: Any) -> int:
    """Return the number of tokens that share one row."""
    ratio = getattr(spec, "tokens_per_state", None)
    return int(ratio if ratio is not None else getattr(spec, "compress_ratio", 1))


def environment_variables() -> Mapping[str, Callable[[], Any]]:
    """Return vLLM's readers of its environment variables, by name."""
    from vllm import envs

    known: Mapping[str, Callable[[], Any]] = envs.environment_variables
    return known


def downloads_from_modelscope() -> bool:
    """Return True if vLLM takes models and adapters that are not local from ModelScope."""
    return bool(environment_variables()["VLLM_USE_MODELSCOPE"]())


def own_adapter_name(request: Any) -> Hashable:
    """Return what vLLM's own prefix cache knows a request's LoRA adapter by; None without one.

    Until 0.32 that is the adapter's name alone, and a salt without an adapter stands in its place.
    """
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    if request.lora_request is not None:
        return tuple(_gen_lora_extra_hash_keys(request))
    salt = request.cache_salt
    return (salt,) if salt and _takes_salts_for_adapters() else None


def _own_name(request: "Request") -> tuple[Any, ...]:
    """Return the values that vLLM's own prefix cache hashes for a request, as one block."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    count = request.num_tokens
    extra_keys, _ = generate_block_hash_extra_keys(request, 0, count, 0)
    return (*request.all_token_ids, extra_keys)


def _request(**said: Any) -> "Request":
    """Return a request of a few tokens."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    values: dict[str, Any] = {"prompt_token_ids": [0] * 4, "pooling_params": None} | said
    return Request("a", sampling_params=SamplingParams(max_tokens=1), **values)


@functools.cache
def _takes_salts_for_adapters() -> bool:
    """Return True if vLLM's own prefix cache confuses a salt with an adapter of that name.

    The function tries it, so that a release that tells them apart needs no entry here.
    """
    from vllm.lora.request import LoRARequest

    adapted = _request(lora_request=LoRARequest("a", 1, "a"))
    return _own_name(adapted) == _own_name(_request(cache_salt="a"))


def _takes_embeddings_for_tokens() -> bool:
    """Return True if vLLM's own prefix cache confuses embeddings with tokens; tries it.

    The confused prompts are mixed, and differ in which rows are embeddings.
    """
    rows = torch.zeros(4, 1)
    mixed = _request(prompt_embeds=rows, prompt_is_token_ids=[True, True, False, False])
    return _own_name(mixed) == _own_name(_request(prompt_embeds=rows, prompt_token_ids=None))


def _keeps_names_of_sessions() -> bool:
    """Return True if a `resumable` session keeps the hash of a block that it changes.

    The session replaces its last token, which has filled that block.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler._update_request_as_session
    return "block_hashes" not in update.__code__.co_names


def names_media(vllm_config: "VllmConfig") -> bool:
    """Return True if media have names by their content, also those that a request gives none."""
    media = vllm_config.model_config.multimodal_config
    has_processor_cache = media is not None and media.mm_processor_cache_gb > 0
    return bool(vllm_config.cache_config.enable_prefix_caching) or has_processor_cache


def is_number(identifier: str) -> bool:
    """Return True if vLLM names a medium by a number, which other engines give to other media."""
    return re.match(r"renderer\d+-mm-\d+-", identifier) is not None


def shuffles_pages() -> bool:
    """Return True if AITER's attention on ROCm interleaves the tokens of a block."""
    return bool(environment_variables()["VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"]())


def device_type() -> str:
    """Return vLLM's name of the device that it runs on: "cpu", "cuda", "npu" and so on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def add_server_options(parser: Any) -> Any:
    """Add the options of `vllm serve`, the engine's among them, to a parser of vLLM's."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:
        try:  # the newest release's, then the oldest one's
            from vllm.entrypoints.common.cli_args import (  # type: ignore[import-not-found]
                make_arg_parser,
            )
        except ModuleNotFoundError:
            from vllm.entrypoints.openai.cli_args import (  # type: ignore[import-not-found]
                make_arg_parser,
            )
    return make_arg_parser(parser)


def refuse_missing_embeddings(connector: str) -> None:
    """Have vLLM refuse media without pixels and embeddings if this connector is the only one.

    That is for engines that compute prompts themselves (`kv_both`), unless a connector brings
    embeddings. vLLM 0.32 takes such media wherever a connector may load, and turns
    `enable_mm_embeds` on. The pool may not have the KV, and a step without the embedding ends the
    engine. A second call does nothing.
    """
    from vllm.config import VllmConfig

    resolve = getattr(VllmConfig, "_resolve_mm_embedding_inputs", None)  # not in vLLM 0.27.1
    if resolve is None or hasattr(resolve, "__wrapped__"):
        return

    @functools.wraps(resolve)
    def resolve_without(self: "VllmConfig") -> None:
        transfer = self.kv_transfer_config
        is_named = transfer is not None and transfer.kv_connector == connector
        if not (is_named and transfer.is_kv_producer):
            resolve(self)
            return
        self.kv_transfer_config = None
        try:
            resolve(self)
        finally:
            self.kv_transfer_config = transfer

    VllmConfig._resolve_mm_embedding_inputs = resolve_without


def ignores_spans_of_media(model: Any) -> bool:
    """Return True if images of a model such as Gemma 3 do not attend to all of themselves.

    vLLM refuses GPU backends without it, and takes its only backend for CPUs without asking.
    """
    if device_type() != "cpu" or not model.is_mm_prefix_lm:
        return False
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return not CPUAttentionBackend.supports_mm_prefix()


def reports_failed_loads_by_request() -> bool:
    """Return True if workers report failed loads by request, instead of by block.

    Models with several KV cache groups need it: a block id means several pages there, and a vLLM
    without it raises when a block of such a model is reported.
    """
    return "failed_recving" in {field.name for field in fields(KVConnectorOutput)}


def stops_at_first() -> bool:
    """Return True if loaded requests wait behind one that there are no blocks for.

    Newer releases have a separate queue for requests that hold blocks.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "kv_holding_waiting" not in Scheduler.__init__.__code__.co_names


def has_loads_within_steps() -> bool:
    """Return True if vLLM knows loads within a step and takes back requests whose load fails."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "has_sync_kv_loads" in {field.name for field in fields(SchedulerOutput)}


def takes_steps_back(vllm_config: "VllmConfig") -> bool:
    """Return True if vLLM computes a running request again from the first token not loaded.

    The second model runner (VLLM_USE_V2_MODEL_RUNNER) keeps a running request's tokens and their
    count on the device. A lower count from the scheduler does not reach it, so the request goes on
    at wrong positions.
    """
    return not vllm_config.use_v2_model_runner


def passes_of_modules(vllm_config: "VllmConfig") -> int:
    """Return how many modules of an MTP drafter vLLM runs over all tokens of a step, in turn.

    The second model runner runs one for each token that it drafts, if the drafter has several. The
    first one runs the first module alone.
    """
    drafts = vllm_config.speculative_config
    chains = getattr(drafts, "use_multi_module_mtp", None)  # releases without it run one, too
    if drafts is None or chains is None or not vllm_config.use_v2_model_runner or not chains():
        return 1
    return int(drafts.num_speculative_tokens)


def offers_states() -> bool:
    """Return True if vLLM names the block and the last token of a complete recurrent state."""
    from vllm.v1.core.sched import output

    state = getattr(output, "KVConnectorBlockState", None)
    return state is not None and "boundary_state_offloads" in {f.name for f in fields(state)}


def forms_of_layers(kv_cache_config: Any) -> dict[str, int]:
    """Return a number for each layer with pages on this rank, equal for equal specs in a group.

    Newer releases describe such layers together, older ones give each layer a tensor of its size.
    """
    return {
        name: number if hasattr(tensor, "layers") else tensor.size
        for number, tensor in enumerate(kv_cache_config.kv_cache_tensors)
        for name in (tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)
    }


def page_bytes_of_layers(kv_cache_config: Any) -> dict[str, int]:
    """Return for each layer with pages on this rank the bytes from a page to the next."""
    return {
        name: min(tensor.block_stride, tensor.layer_stride)
        if hasattr(tensor, "layers")
        else tensor.size // kv_cache_config.num_blocks
        for tensor in kv_cache_config.kv_cache_tensors
        for name in (tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)
    }


def hit_source(kinds: Sequence[str]) -> Any:
    """Return vLLM's name for the source of hits from any of these kinds of store.

    The result is None in old releases.
    """
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    sources = {"host": CacheHitSource.HOST, "file": CacheHitSource.DISK}
    known = {sources.get(kind, CacheHitSource.EXTERNAL_UNSPECIFIED) for kind in kinds}
    return known.pop() if len(known) == 1 else CacheHitSource.EXTERNAL_UNSPECIFIED


def transfer_results(loaded: Iterable[str], failed: Iterable[str]) -> Any:
    """Return the answer of a worker to newer releases after a step."""
    assert _TransferResults is not None
    return _TransferResults(finished_recving=set(loaded), failed_recving=set(failed))


def merges_answers() -> bool:
    """Return True if several connectors of a MultiConnector may answer the same finished request.

    vLLM-Ascend's own MultiConnector takes one answer, whatever the release.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return hasattr(MultiConnector, "_aggregate_request_finished")


def block_hashes(hashes: Any, hash_size: int, size: int) -> Any:
    """Return the hashes of blocks of `size` tokens, given those of blocks of `hash_size`."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    is_view = isinstance(hashes, BlockHashListWithBlockSize)
    return (
        hashes
        if is_view or size == hash_size
        else BlockHashListWithBlockSize(hashes, hash_size, size)
    )


def tells_locality() -> bool:
    """Return True if KV events tell a medium of the engine's host from one that others share.

    Without it the removal of a block from host memory would read as its removal from Mooncake.
    """
    from vllm.distributed.kv_events import BlockStored

    return "locality" in event_fields(BlockStored)


def event_fields(event: type) -> frozenset[str]:
    """Return the fields that a KV event has in this release."""
    fields: tuple[str, ...] = event.__struct_fields__  # type: ignore[attr-defined]
    return frozenset(fields)


def event_extra_keys(keys: list[Any]) -> Any:
    """Return the extra keys of blocks as KV events have them.

    Newer releases tag them in hashes only.
    """
    try:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys
    except ImportError:
        return keys or None
    return to_event_extra_keys(keys)


def step_while_pending() -> None:
    """Have vLLM make steps while a connector has pending work, though no request is left.

    Newer releases ask `has_pending_push_work`. vLLM 0.23 asks nothing, so saves, the blocks that
    they hold and KV events would wait for the next request. A second call does nothing.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    own = Scheduler.has_finished_requests
    if hasattr(base.KVConnectorBase_V1, "has_pending_push_work") or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def has_work(self: Scheduler) -> bool:
        return own(self) or _has_pending_work(self.connector)

    Scheduler.has_finished_requests = has_work


def _has_pending_work(connector: Any) -> bool:
    parts = getattr(connector, "_connectors", (connector,))  # of a MultiConnector
    asked = [part for part in parts if hasattr(part, "has_pending_push_work")]
    return any(part.has_pending_push_work() for part in asked)


class BlockTables:
    """The block tables of requests. Scheduler's thread.

    vLLM 0.30 and newer resolve them on demand; for older releases, which tell of some requests
    alone, they are collected from the steps, until `drop_request`.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def of_step(self, output: "SchedulerOutput") -> Callable[[str], Sequence[Sequence[int]]]:
        """Return a function that looks up a scheduled request's tables, one a KV cache group.

        In older releases they still name blocks that were freed since.
        """
        state = getattr(output, "kv_connector_block_state", None)
        find = getattr(state, "get_block_ids", None)
        if find is None:
            self._take(output)
            return self._table
        return lambda request_id: find(request_id) or ()

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._tables.pop(request_id, None)

    def _table(self, request_id: str) -> Sequence[Sequence[int]]:
        return self._tables.get(request_id, ())

    def _take(self, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids or request_id not in self._tables:
                self._tables[request_id] = [list(ids) for ids in new_ids or ()]
            elif new_ids is not None:
                for table, ids in zip(self._tables[request_id], new_ids, strict=True):
                    table.extend(ids)


def state_offers(output: "SchedulerOutput") -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the recurrent states that are complete when the step ends, by request.

    A state is (KV cache group, block, tokens). Older releases offer none.

    vLLM offers states of tokens that it knows, never of drafts. If a request has drafts in the
    step, its state is copied into the block after the drafts are accepted. By then a runner may
    have asked for the results.
    """
    state = getattr(output, "kv_connector_block_state", None)
    return getattr(state, "boundary_state_offloads", None) or {}


@dataclass(frozen=True, slots=True)
class Defect:
    """A combination that vLLM computes wrongly, and whether an engine's configuration has it.

    `loads`: vLLM computes rightly after a loaded prefix. `shares_media`: it does so, too, if there
    are media in it. `saves_base`, `saves_adapters`: it computes rightly for requests without and
    with a LoRA adapter. `trusts_hits`: the blocks that its own prefix cache hands to this request
    are the request's; `trusts_later_hits`: and so are those that it hands to any request that
    comes after this one. `warning` says what is wrong and what the pool leaves out.
    """

    name: str
    applies: Callable[["VllmConfig"], bool]
    warning: str
    loads: bool = True
    shares_media: bool = True
    saves_base: bool = True
    saves_adapters: bool = True
    trusts_hits: Callable[["Request"], bool] = lambda _: True
    trusts_later_hits: Callable[["Request"], bool] = lambda _: True


def known_defects(vllm_config: "VllmConfig") -> tuple[Defect, ...]:
    """Return the defects that an engine of this configuration has."""
    return tuple(defect for defect in DEFECTS if defect.applies(vllm_config))


def _is_mla_without_prefixes(vllm_config: "VllmConfig") -> bool:
    """Return True for MLA on a CPU without AMX, where vLLM turns both of these off."""
    of_cpu = device_type() == "cpu" and vllm_config.model_config.use_mla
    chunks = vllm_config.scheduler_config.enable_chunked_prefill
    return of_cpu and not (chunks or vllm_config.cache_config.enable_prefix_caching)


def _caches_no_prefixes(vllm_config: "VllmConfig") -> bool:
    """Return True for a model of which vLLM caches no prefixes, even if it is asked to.

    Of models without attention (Mamba) it does where it is asked to, and they are refused where it
    is not.
    """
    model = vllm_config.model_config
    is_asked = model.attn_type == "attention_free" and model.pooler_config is None
    return not (is_asked or model.is_prefix_caching_supported)


def _returns_what_is_beside_kv(vllm_config: "VllmConfig") -> bool:
    """Return True if answers have more of every token than the pool stores."""
    outputs = getattr(vllm_config, "aux_output_config", None)  # not in vLLM 0.27.1
    drafts = vllm_config.speculative_config
    has_hidden_states = drafts is not None and drafts.method == "extract_hidden_states"
    return has_hidden_states or (outputs is not None and bool(outputs.enabled))


def _prunes_positions(vllm_config: "VllmConfig") -> bool:
    """Return True if videos are pruned and positions follow them.

    vLLM takes the positions from the encoder's output, which it does not compute for a prefix that
    it has.
    """
    model = vllm_config.model_config
    media = model.multimodal_config
    return bool(media is not None and media.is_multimodal_pruning_enabled() and model.uses_mrope)


def _names_do_not_tell_embeddings(vllm_config: "VllmConfig") -> bool:
    """Return True if a medium has several embeddings under one name, chosen by the request.

    vLLM's processor of such a model goes around its own cache of processed media: for more than so
    many images, which it then prepares otherwise, or where it adds noise. One that always does so
    gives no reason.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseMultiModalProcessor

    model = vllm_config.model_config
    if model.multimodal_config is None:
        return False
    factories = MULTIMODAL_REGISTRY._get_model_cls(model)._processor_factory
    process = getattr(factories.processor, "_cached_apply_hf_processor", None)
    return (
        process not in (None, BaseMultiModalProcessor._cached_apply_hf_processor)
        and "_apply_hf_processor" in process.__code__.co_names
    )


def _torch_kernels_adapt_base_tokens() -> bool:
    """Return True if vLLM's torch LoRA kernels adapt tokens that have no adapter.

    They are tried, so that a release that has mended it is known as such.
    """
    from vllm.lora.ops.torch_ops import sgmv_expand
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    wrapper = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
    if not issubclass(wrapper, PunicaWrapperCPU):
        return False
    # One token without an adapter (-1), then one with the only one (0).
    adapters, ones = torch.tensor([-1, 0]), torch.ones(2, 1)
    values, starts, lengths = torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([1, 1])
    sgmv_expand(ones, torch.ones(1, 1, 1, 1), values, starts, lengths, adapters, 2, 1, 2, True)
    return bool(values[0, 0] != 0)


def _turns_heads_wrongly(vllm_config: "VllmConfig") -> bool:
    """Return True for a model on a CPU whose rotary kernel takes heads for tokens.

    vLLM's own kernel gets the heads apart from an LFM2, or a DeepSeek without MLA
    (VLLM_MLA_DISABLE).
    """
    model = vllm_config.model_config
    is_lfm2 = str(model.hf_text_config.model_type).startswith("lfm2")
    has_no_mla = model.is_deepseek_mla and not model.use_mla
    if device_type() != "cpu" or not (is_lfm2 or has_no_mla):
        return False
    if not vllm_config.compilation_config.is_custom_op_enabled("rotary_embedding"):
        return False
    return _rotary_kernel_mistakes_heads()


def _rotary_kernel_mistakes_heads() -> bool:
    """Return True if the kernel turns `[tokens, heads, size]` unlike `[tokens, heads * size]`.

    It is tried, so that a release that has mended it is known as such. What it touches beyond its
    tokens is the trial's own memory.
    """
    from vllm._custom_ops import rotary_embedding

    tokens, heads, size, around = 4, 2, 32, 64
    angles = torch.arange(tokens * size // 2).view(tokens, -1) / 7
    cosines_and_sines = torch.cat([angles.cos(), angles.sin()], dim=1)
    turned = []
    for shape in ((tokens, heads, size), (tokens, heads * size)):
        memory = torch.zeros(2, 2 * around + tokens, heads * size)
        query, key = (each[around : around + tokens] for each in memory)
        query[:] = key[:] = torch.linspace(-1, 1, heads * size)
        rotary_embedding(
            torch.arange(tokens), query.view(shape), key.view(shape), size, cosines_and_sines, True
        )
        turned.append(query)
    return not torch.allclose(*turned)


DEFECTS = (
    Defect(
        "MLA on a CPU without AMX",
        _is_mla_without_prefixes,
        "nothing is loaded: vLLM's CPU backend for MLA computes wrong values after a loaded "
        "prefix, and turns its own prefix caching off; saves go on, for other engines",
        loads=False,
    ),
    Defect(
        "models of which vLLM caches no prefixes",
        _caches_no_prefixes,
        "nothing is loaded: vLLM caches no prefixes for this model (pooling by mean, for example, "
        "needs every token's output); saves go on, for other engines",
        loads=False,
    ),
    Defect(
        "routed experts or hidden states in answers",
        _returns_what_is_beside_kv,
        "nothing is loaded: answers have routed experts (enable_return_routed_experts) or hidden "
        "states (extract_hidden_states) of every token, and the pool stores KV alone; saves go on, "
        "for other engines",
        loads=False,
    ),
    Defect(
        "LoRA by vLLM's kernels in plain torch (CPU)",
        lambda vllm_config: (
            vllm_config.lora_config is not None and _torch_kernels_adapt_base_tokens()
        ),
        "only requests with a LoRA adapter are saved: vLLM's LoRA kernels for CPUs give requests "
        "without one the values of an adapter in the same step. All requests are loaded. To save "
        "those of the base model, run it in an engine without enable_lora",
        saves_base=False,
    ),
    Defect(
        "LFM2, or DeepSeek without MLA, by vLLM's rotary kernel for CPUs",
        _turns_heads_wrongly,
        "nothing is saved or loaded: vLLM's rotary kernel for CPUs computes this model wrong: its "
        "answers depend on what else is in a step. Leave the kernel out: --compilation-config "
        """'{"custom_ops": ["all", "-rotary_embedding"]}'""",
        loads=False,
        saves_base=False,
        saves_adapters=False,
    ),
    Defect(
        "pruned videos (video_pruning_rate) in models with M-RoPE",
        _prunes_positions,
        "requests with media share nothing: videos are pruned (video_pruning_rate), and after a "
        "prefix that is given vLLM counts the tokens that were pruned, so positions are wrong. "
        "Leave video_pruning_rate out to share them",
        shares_media=False,
    ),
    Defect(
        "media that are prepared as their request says (DeepSeek VL2, H2OVL)",
        _names_do_not_tell_embeddings,
        "requests with media share nothing: this model's processor prepares an image otherwise "
        "beside others, or adds noise, and vLLM's own prefix cache takes the results for one",
        shares_media=False,
    ),
    Defect(
        "prompts of embeddings and tokens (enable_prompt_embeds)",
        lambda vllm_config: (
            bool(vllm_config.cache_config.enable_prefix_caching)
            and vllm_config.model_config.enable_prompt_embeds
            and _takes_embeddings_for_tokens()
        ),
        "prompts with embeddings that begin in vLLM's own prefix cache are not saved: its hashes "
        "do not say which rows are tokens, so it hands one prompt's blocks to another. To save "
        "them all, turn prefix caching off (--no-enable-prefix-caching)",
        trusts_hits=lambda request: request.prompt_embeds is None,
    ),
    Defect(
        "sessions that take more input (resumable)",
        lambda vllm_config: (
            bool(vllm_config.cache_config.enable_prefix_caching) and _keeps_names_of_sessions()
        ),
        "once a session that takes more input (resumable) has run, requests that begin in vLLM's "
        "own prefix cache are not saved: it keeps a session's block under the hash of a token that "
        "was replaced. vLLM 0.32 does not",
        trusts_later_hits=lambda request: not request.resumable,
    ),
    Defect(
        "steps that fail and are left behind (enable_fault_tolerance)",
        lambda vllm_config: getattr(vllm_config.parallel_config, "enable_fault_tolerance", False),
        "nothing is saved: with enable_fault_tolerance vLLM goes on after a step that has failed, "
        "and counts the step's tokens as computed; loads go on",
        saves_base=False,
        saves_adapters=False,
    ),
)
