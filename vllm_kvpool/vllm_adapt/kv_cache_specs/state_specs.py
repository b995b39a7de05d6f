"""Recurrent states from vLLM's specs: their units and forms, their pages, what keeps them apart.

vLLM describes what one rank has. Tensor parallelism deals out, in order, channels (short
convolution, Mamba1) or heads, each with the inputs of the convolution that belong to it: in Mamba2
x, B and C, in gated delta networks (GDN and Kimi's KDA) Q, K and V, one after another.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.states import MAX_TP_SIZE, StateForm, WindowPart, num_units
from vllm_kvpool.vllm_adapt import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _StateKind(NamedTuple):
    """A kind of state: its name in keys, and which tensors it has; that of a convolution is first.

    `has_draft_rows`: drafts add rows to the convolution's window.
    """

    name: str
    has_window: bool
    has_draft_rows: bool
    has_recurrent: bool


# By the names of vLLM's backends.
_KINDS = {
    "SHORT_CONV": _StateKind("short_conv", True, True, False),
    "MAMBA1": _StateKind("mamba1", True, False, True),
    "MAMBA2": _StateKind("mamba2", True, True, True),
    "GDN_ATTN": _StateKind("gdn", True, True, True),
    "LINEAR": _StateKind("linear", False, False, True),
}
# Under which configurations have the number of Mamba2's groups.
_NAMES_OF_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def check_engine(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError, with the option that helps, if this engine's states cannot be shared."""
    if compat.device_type() == "npu":
        raise ConfigError(
            "recurrent states are not shared from Ascend NPUs yet; run this model without kvpool"
        )
    if not compat.offers_states():
        raise ConfigError(
            "this model keeps recurrent states, and this release of vLLM does not say when one is "
            "complete; use vLLM 0.32, or run this model without kvpool"
        )
    if vllm_config.cache_config.mamba_cache_mode != "align":
        raise ConfigError(
            "this engine keeps the newest recurrent state of a request alone; turn prefix caching "
            "on (--enable-prefix-caching), which keeps those at the ends of blocks"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(
                f"recurrent states are not shared with context parallelism yet; set {name} to 1"
            )


def check_blocks(block_size: int, chunk_tokens: int) -> None:
    """Raise ConfigError if states at the ends of blocks fall between the ends of chunks."""
    if block_size % chunk_tokens and chunk_tokens % block_size:
        raise ConfigError(
            f"recurrent states are kept every {block_size} tokens, which chunks of {chunk_tokens} "
            f"do not meet; set --block-size {chunk_tokens}, of which vLLM then takes a multiple"
        )


def kind_of(spec: Any) -> str:
    """Return the kind of state, as in names of layer groups."""
    return _kind(spec).name


def _kind(spec: Any) -> _StateKind:
    name = spec.mamba_type.name
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"recurrent states of kind {name} are not known here; run this model without kvpool"
        )
    if len(spec.shapes) > kind.has_window + kind.has_recurrent:
        raise ConfigError(
            f"states of this model ({kind.name}) have rings of recent inputs beside them, which "
            "cannot be shared yet; leave out --use-replayssm"
        )
    return kind


def state_form(spec: Any, vllm_config: "VllmConfig") -> StateForm:
    """Return a unit's part of a layer's state; the same in all engines of the model.

    `spec` is vLLM's `MambaSpec`, of one rank. ConfigError for what cannot be cut into units.
    """
    kind = _kind(spec)
    tp_size = 1 if spec.tp_replicated else vllm_config.parallel_config.tensor_parallel_size
    channels, rows = _window_shape(spec, kind, vllm_config)
    recurrent = _recurrent_shape(spec)
    parts, counts = _parts(kind, channels, recurrent, tp_size, vllm_config)
    if spec.tp_replicated:
        units = 1
    else:
        heads = int(vllm_config.model_config.model_arch_config.total_num_attention_heads)
        units = num_units(*counts, *([heads] if heads else []))
    if units % tp_size:
        raise ConfigError(
            f"states of this model ({kind.name}) have {units} units, which cannot be dealt out to "
            f"{tp_size} ranks; set tensor_parallel_size to at most {MAX_TP_SIZE}"
        )
    return StateForm(
        num_units=units,
        window_rows=rows,
        item_bytes=spec.dtypes[0].itemsize if kind.has_window else 0,
        parts=tuple(
            WindowPart(count, True) if is_shared else WindowPart(count * tp_size // units)
            for count, is_shared in parts
        ),
        recurrent_bytes=math.prod(recurrent or (0,)) * spec.dtypes[-1].itemsize * tp_size // units,
    )


def _recurrent_shape(spec: Any) -> tuple[int, ...]:
    """Return the shape of a rank's recurrent state, head by head; () if there is none."""
    return tuple(spec.shapes[-1]) if _kind(spec).has_recurrent else ()


def _window_shape(spec: Any, kind: _StateKind, vllm_config: "VllmConfig") -> tuple[int, int]:
    """Return the channels of a rank, and rows of the window without those for drafts."""
    if not kind.has_window:
        return 0, 0
    channels, rows = spec.shapes[0] if _dim_first() else spec.shapes[0][::-1]
    rows -= _draft_rows(kind, vllm_config)
    if rows < 1:
        raise ConfigError(
            f"states of this model ({kind.name}) keep no rows for drafts, so their window cannot "
            "be told from them; run it without drafts, or without kvpool"
        )
    return channels, rows


def _parts(
    kind: _StateKind,
    channels: int,
    recurrent: tuple[int, ...],
    tp_size: int,
    vllm_config: "VllmConfig",
) -> tuple[list[tuple[int, bool]], list[int]]:
    """Return the parts of a rank's window, and the model's numbers that TP cuts evenly.

    A part is its channels, and True if all units share it.
    """
    if kind.name in ("short_conv", "mamba1"):
        return [(channels, False)], [channels * tp_size]
    if kind.name == "linear":
        return [], [recurrent[0] * tp_size]
    heads, own_dim, other_dim = recurrent
    own = heads * own_dim  # x or V
    width = (channels - own) // (2 * other_dim)  # groups of B and C, or heads of Q and K
    other = width * other_dim
    if width < 1 or own + 2 * other != channels:
        raise ConfigError(
            f"the convolution of this model's states ({kind.name}, {channels} channels) cannot be "
            f"told apart into parts beside {heads} heads of {own_dim} x {other_dim}; run it "
            "without kvpool"
        )
    if kind.name == "gdn":
        return [(other, False), (other, False), (own, False)], [heads * tp_size, width * tp_size]
    is_shared = width == 1 and _num_groups(vllm_config, tp_size) == 1
    counts = [heads * tp_size, *([] if is_shared else [width * tp_size])]
    return [(own, False), (other, is_shared), (other, is_shared)], counts


def _num_groups(vllm_config: "VllmConfig", tp_size: int) -> int:
    """Return the groups of Mamba2 in the whole model, where a rank has one."""
    if tp_size == 1:
        return 1
    text = vllm_config.model_config.hf_text_config
    for name in _NAMES_OF_GROUPS:
        if (count := getattr(text, name, None)) is not None:
            return int(count)
    raise ConfigError(
        "this model's configuration does not say how many groups its Mamba2 layers have, so it "
        "cannot be told whether ranks share one; set tensor_parallel_size to 1"
    )


def state_pages(
    tensor: torch.Tensor, spec: Any, form: StateForm, vllm_config: "VllmConfig"
) -> LayerPages:
    """Return the pages of one layer on this rank, vLLM's `[B, 1, 1, C]` in bytes."""
    tp_size = 1 if spec.tp_replicated else vllm_config.parallel_config.tensor_parallel_size
    return page_formats.from_state(
        tensor,
        form,
        form.num_units // tp_size,
        dim_first=_dim_first(),
        draft_rows=_draft_rows(_kind(spec), vllm_config),
    )


def _draft_rows(kind: _StateKind, vllm_config: "VllmConfig") -> int:
    return int(vllm_config.num_speculative_tokens) if kind.has_draft_rows else 0


def _dim_first() -> bool:
    # Not at the top of the module: builds for other devices need not have it.
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def content_of(spec: Any, form: StateForm) -> dict[str, Any]:
    """Return all that makes the bytes of a state, for the namespace."""
    return {
        "state": kind_of(spec),
        "dtypes": [str(dtype) for dtype in spec.dtypes],
        "window": [form.window_rows, [(part.channels, part.is_shared) for part in form.parts]],
        # Of one head or channel.
        "recurrent": _recurrent_shape(spec)[1:],
        # vLLM's kernels for CPUs keep the matrix of each head transposed.
        "transposed": kind_of(spec) == "gdn" and compat.device_type() == "cpu",
    }
