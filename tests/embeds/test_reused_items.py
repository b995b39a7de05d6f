"""Items that an encoder's request finds in the engine's own cache: its consumer gets them, too."""

from pathlib import Path

import pytest
import torch

from tests.embeds.engines import wait_for
from tests.embeds.vision_engine import VisionEngine, encoded

SHORT_S = 0.1


@pytest.mark.parametrize("pushed", [False, True], ids=["wanted", "pushed"])
def test_item_that_the_encoder_dropped_arrives_after_a_request_that_reuses_it(
    pushed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder runs no step after the request's own, as an idle engine does."""
    with (
        VisionEngine(tmp_path, "ec_producer", monkeypatch, waiting_timeout_s=SHORT_S) as producer,
        VisionEngine(tmp_path, "ec_consumer", monkeypatch) as consumer,
    ):
        producer.add("first", "image")
        producer.run()
        machine = producer.side._producer
        assert machine is not None
        wait_for(lambda: not machine.cache.items and bool(machine.counts["never_taken"]))

        target = {"consumer_zmq": consumer.endpoint} if pushed else {}
        producer.add("again", "image", **target)
        producer.run()
        assert producer.encoded == ["image"]
        consumer.add("use", "image", has_media=False, peer=producer.endpoint)
        consumer.run()
        assert torch.equal(consumer.seen["use"].used["image"], encoded("image"))
