"""Imports vLLM before the tests: import warnings of vLLM and torch are not the pool's."""

import importlib.util
import warnings

import pytest

from tests.support.left_out import left_out

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.request
    import vllm.v1.worker.gpu.model_runner  # noqa: F401 - imported for its effect

    import vllm_kvpool.connector  # noqa: F401 - the same

    HAS_LAYOUTS = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None

# Tests of spec fields that only 0.32 has, and of a model that 0.27.1 does not start.
NEWER_FIELDS = {
    "test_algorithms_name_images_differently",  # an option in 0.32
    "test_sizes_that_differ_by_layer_count",
    "test_contents_keep_engines_apart",
    "test_where_the_bytes_lie_may_differ",
    "test_what_is_kept_longer_for_drafts_is_read_longer",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need fields which this release's specs lack, and report them."""
    newer = [item for item in items if getattr(item, "originalname", "") in NEWER_FIELDS]
    if newer and not HAS_LAYOUTS:
        items[:] = [item for item in items if item not in newer]
        config.hook.pytest_deselected(items=newer)


# 0.27.1 has no `KVCacheLayout`, no views of pages by it, none of the newer page contents, no states
# at boundaries, no sources of hits and no interface for the pool's embedding connector. These files
# have nothing to test there.
NEWER_FILES = left_out(
    __file__,
    *("test_embeds_end.py", "test_fingerprint.py", "test_kv_sharing.py"),
    *("test_page_formats.py", "test_refusals.py", "test_hit_sources.py"),
    *("kv_cache_specs/test_state_specs.py", "kv_cache_specs/test_deepseek_v4.py"),
    "test_packed_pages.py",
)
collect_ignore = [] if HAS_LAYOUTS else NEWER_FILES
if not importlib.util.find_spec("vllm.v1.metrics.cache_hit_source"):  # since 0.32
    collect_ignore += left_out(__file__, "test_hit_sources.py")
