"""Combinations that vLLM is known to compute wrongly, and what the pool leaves alone for each.

An engine that computes wrong values must not hand them to others, nor be given what makes it
compute them. One row for each combination; docs/failures.md and tests have the same rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvpool.vllm_adapt import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Defect:
    """A combination, by name, and whether an engine's configuration has it.

    `loads`: what is computed after a loaded prefix is right. `saves_base`: what is computed for
    requests without an adapter is right. `warning` says what is wrong and what is not done.
    """

    name: str
    applies: Callable[["VllmConfig"], bool]
    warning: str
    loads: bool = True
    saves_base: bool = True


def known_defects(vllm_config: "VllmConfig") -> tuple[Defect, ...]:
    """The rows that an engine of this configuration has."""
    return tuple(defect for defect in DEFECTS if defect.applies(vllm_config))


def _is_mla_without_prefixes(vllm_config: "VllmConfig") -> bool:
    """MLA on a CPU without AMX, for which the platform turns both of these off."""
    of_cpu = compat.device_type() == "cpu" and vllm_config.model_config.use_mla
    chunks = vllm_config.scheduler_config.enable_chunked_prefill
    return of_cpu and not (chunks or vllm_config.cache_config.enable_prefix_caching)


def _needs_every_token(vllm_config: "VllmConfig") -> bool:
    return not vllm_config.model_config.is_prefix_caching_supported


def _adapts_base_requests(vllm_config: "VllmConfig") -> bool:
    return vllm_config.lora_config is not None and _torch_kernels_adapt_base_tokens()


def _torch_kernels_adapt_base_tokens() -> bool:
    """Whether LoRA runs by vLLM's kernels in plain torch, and these give an adapter's values to
    tokens without one: tried, so that a release that does not is known as such."""
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


DEFECTS = (
    Defect(
        "MLA on a CPU without AMX",
        _is_mla_without_prefixes,
        "vLLM's CPU backend for MLA computes wrong values after a prefix that it is given, and "
        "turns its own prefix caching off, so nothing is loaded; what is computed is saved for "
        "others",
        loads=False,
    ),
    Defect(
        "models of which vLLM caches no prefixes",
        _needs_every_token,
        "vLLM caches no prefixes for this model (pooling by mean, for example, needs every "
        "token's output), so nothing is loaded; what is computed is saved for others",
        loads=False,
    ),
    Defect(
        "LoRA by vLLM's kernels in plain torch (CPU)",
        _adapts_base_requests,
        "vLLM's LoRA kernels for CPUs give requests without an adapter the values of one that "
        "runs in the same step, so only requests with an adapter are saved; all are loaded. Run "
        "the base model in an engine without enable_lora to save its requests too",
        saves_base=False,
    ),
)
