"""The KV cache specs of vLLM-Ascend, as its published wheel defines them: shared or refused."""

import inspect
from importlib.metadata import version
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm_ascend.core import kv_cache_interface

from vllm_kvpool.vllm_adapt import ascend
from vllm_kvpool.vllm_adapt.kv_cache_specs.layer_groups import SHAREABLE_SPECS

pytestmark = pytest.mark.ascend

RELEASE = version("vllm-ascend")
SPECS = {
    "0.23.0": {"AscendMLAAttentionSpec", "AscendSlidingWindowMLASpec"},
    "0.26.0rc1": {
        *("AscendMLAAttentionSpec", "AscendSFAIndexerCacheSpec", "AscendSlidingWindowMLASpec"),
    },
}
"""Classes of specs, by release."""
OF_OTHER_LATENTS = {
    "0.23.0": [
        *({"sparse_head_dim": (512, 64, 128)}, {"cache_sparse_sfa_c8": True}),
        *({"cache_sparse_li_c8": True}, {"scale_dim": 4}),
    ],
    "0.26.0rc1": [{"cache_sparse_sfa_c8": True}, {"scale_dim": 4}, {"store_on_host": True}],
}
"""Fields of a latent's spec that say that more or less than a latent is in a page, by release."""
LATENT = {"block_size": 128, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def is_shared(spec: Any) -> bool:
    return type(spec) in SHAREABLE_SPECS or ascend.is_plain_latent(spec)


def test_no_spec_of_the_wheel_is_unknown_and_none_has_the_class_of_a_shared_one() -> None:
    own = {
        name: each
        for name, each in vars(kv_cache_interface).items()
        if inspect.isclass(each) and each.__module__ == kv_cache_interface.__name__
    }
    assert {name for name, each in own.items() if issubclass(each, KVCacheSpec)} == SPECS[RELEASE]
    assert not set(SHAREABLE_SPECS) & set(own.values())


def test_a_latent_alone_is_shared() -> None:
    latent = kv_cache_interface.AscendMLAAttentionSpec
    assert is_shared(latent(**LATENT))
    for fields in OF_OTHER_LATENTS[RELEASE]:
        assert not is_shared(latent(**LATENT, **fields)), fields


def test_an_indexer_beside_a_latent_is_refused() -> None:
    """In 0.23.0 the indexer is a field of the latent's spec."""
    indexer = getattr(kv_cache_interface, "AscendSFAIndexerCacheSpec", None)
    assert (indexer is None) is (RELEASE == "0.23.0")
    assert indexer is None or not is_shared(indexer(**LATENT | {"head_size": 128}))
