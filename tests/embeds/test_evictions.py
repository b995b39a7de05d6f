"""vLLM's scheduler evicts an item and allocates nothing: a later request must not count on it."""

from pathlib import Path

import pytest

from tests.embeds.vision_engine import ROWS, VisionEngine

CHUNK = 32


def test_request_without_media_does_not_use_an_item_evicted_in_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's runner would raise "Encoder cache miss", and the engine end."""
    with VisionEngine(tmp_path, "ec_consumer", monkeypatch) as engine:
        scheduler, cache = engine.scheduler, engine.scheduler.encoder_cache_manager
        cache.cache_size = ROWS
        cache.reset()
        scheduler.scheduler_config.long_prefill_token_threshold = CHUNK
        scheduler.adaptive_long_prefill_threshold = False
        engine.add("first", "x")
        engine.run()
        engine.add("late", "y", padding=2 * CHUNK)  # its first chunk has no row of y
        engine.add("none", "x", has_media=False)
        engine.step()
        assert scheduler.requests["late"].num_computed_tokens == CHUNK
        assert engine.encoded == ["x"], "its media are not here"
        assert "x" not in cache.cached
        engine.run()
        assert engine.encoded == ["x", "y"]
        assert engine.seen["none"].reason == "error"
