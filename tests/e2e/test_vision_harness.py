"""Images in the harness, and vLLM's own transfer of embeddings: what the tests of ours stand on."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import EncodedImage, Engine, EngineError, EngineSpec, Image
from tests.e2e.pool import same
from tests.e2e.vision import about, about_encoded, producer_and_consumer, shared_files
from tests.support.models import LlavaShape, Qwen2VLShape

pytestmark = pytest.mark.e2e

SHAPE = LlavaShape()
IMAGES = [Image(seed=seed) for seed in range(4)]

QWEN_SHAPE = Qwen2VLShape()
NO_VIDEOS = {"limit_mm_per_prompt": {"image": 4, "video": 0}}
QWEN_IMAGES = [
    Image(seed=seed, width=28 * columns, height=28 * rows)
    for seed, (columns, rows) in enumerate([(3, 7), (1, 5), (11, 2), (4, 4)])
]

Llava = Callable[[LlavaShape], Path]
Qwen2VL = Callable[[Qwen2VLShape], Path]


def test_another_image_shows_in_what_follows(llava: Llava, engines: EngineShelf) -> None:
    engine = engines.get(EngineSpec(model=llava(SHAPE), images=4))
    first, again, other = engine.generate(
        about(IMAGES[0]), about(IMAGES[0]), about(IMAGES[1]), timeout_s=120
    )
    assert logprob_distance(again, first) < LOGPROB_TOLERANCE
    assert logprob_distance(other, first) > 25 * LOGPROB_TOLERANCE


def test_the_order_of_images_shows(llava: Llava, engines: EngineShelf) -> None:
    engine = engines.get(EngineSpec(model=llava(SHAPE), images=4))
    first, other = engine.generate(about(*IMAGES), about(*reversed(IMAGES)))
    assert logprob_distance(other, first) > 25 * LOGPROB_TOLERANCE


def test_each_image_is_encoded_once(llava: Llava, engines: EngineShelf) -> None:
    engine = engines.get(EngineSpec(model=llava(SHAPE), images=4))
    engine.reset_encoder_cache()
    before = engine.images_encoded()
    engine.generate(about(*IMAGES))
    assert engine.reset_prefix_cache()
    engine.generate(about(*IMAGES))
    assert engine.images_encoded() - before == len(IMAGES)


def test_an_encoder_that_raises_fails_the_call(llava: Llava, tmp_path: Path) -> None:
    spec = EngineSpec(model=llava(SHAPE), images=1, encoder_raises=True)
    engine = Engine(spec, tmp_path / "engine.log")
    try:
        assert engine.generate(about())
        with pytest.raises(EngineError, match="the vision encoder was called"):
            engine.generate(about(IMAGES[0]))
    finally:
        engine.kill()


def test_embeddings_of_another_engine_serve(
    llava: Llava, engines: EngineShelf, tmp_path: Path
) -> None:
    alone = EngineSpec(model=llava(SHAPE), images=4)
    (expected,) = engines.get(alone).generate(about(*IMAGES))
    specs = producer_and_consumer(alone, partial(shared_files, tmp_path))
    producer, consumer = map(engines.get, specs)
    (sent,) = producer.generate(about(*IMAGES, max_tokens=1))
    assert producer.images_encoded() == len(IMAGES)
    # What a proxy gets of the request to the producer and hands on with that to the consumer.
    assert sent.ec_transfer_params is not None
    assert {path.name for path in tmp_path.iterdir()} == set(sent.ec_transfer_params)
    (actual,) = consumer.generate(about(*IMAGES, ec_transfer_params=sent.ec_transfer_params))
    same(actual, expected)
    assert consumer.images_encoded() == 0


def test_a_consumer_needs_no_pixels(
    qwen2_vl: Qwen2VL, engines: EngineShelf, tmp_path: Path
) -> None:
    alone = EngineSpec(model=qwen2_vl(QWEN_SHAPE), images=4, llm=NO_VIDEOS)
    (expected,) = engines.get(alone).generate(about(*QWEN_IMAGES))
    specs = producer_and_consumer(alone, partial(shared_files, tmp_path))
    producer, consumer = map(engines.get, specs)
    (sent,) = producer.generate(about(*QWEN_IMAGES, max_tokens=1))
    assert sent.ec_transfer_params is not None
    encoded = [
        EncodedImage(name=name, grid=item["metadata"]["image_grid_thw"])
        for name, item in sent.ec_transfer_params.items()
    ]
    rows = [math.prod(image.grid) // QWEN_SHAPE.merge**2 for image in encoded]
    assert rows == [QWEN_SHAPE.image_rows(image.width, image.height) for image in QWEN_IMAGES]
    (actual,) = consumer.generate(about_encoded(*encoded))
    same(actual, expected)
