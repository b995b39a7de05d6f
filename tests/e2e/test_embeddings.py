"""An engine that encodes and engines that do not, with the connector of embeddings between them.

A consumer's vision encoder raises when it is called. Its window has room for three rows, an image
has sixteen.
"""

import contextlib
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import EncodedImage, Engine, EngineSpec, Image
from tests.e2e.pool import expecting, files, pool, same
from tests.e2e.vision import about, about_encoded
from tests.support.models import LlavaShape, Qwen2VLShape
from tests.support.server_process import free_ports

pytestmark = pytest.mark.e2e

SHAPE = LlavaShape()
ROW_BYTES = 4 * SHAPE.hidden
IMAGES = [Image(seed=seed) for seed in range(4)]
TIMEOUT_S = 120.0

QWEN_SHAPE = Qwen2VLShape()
NO_VIDEOS = {"limit_mm_per_prompt": {"image": 4, "video": 0}}
QWEN_IMAGES = [
    Image(seed=seed, width=28 * columns, height=28 * rows)
    for seed, (columns, rows) in enumerate([(3, 7), (1, 5), (11, 2), (4, 4)])
]

Llava = Callable[[LlavaShape], Path]
Qwen2VL = Callable[[Qwen2VLShape], Path]


def embeds(role: str, port: int, **options: Any) -> Mapping[str, Any]:
    """An `ec_transfer_config` of the connector, by its class name alone."""
    extra = {"transport": "local", "arena_bytes": 3 * ROW_BYTES, **options}
    return {
        "ec_connector": "KVPoolECConnector",
        "ec_role": role,
        "ec_ip": "127.0.0.1",
        "ec_port": port,
        "ec_connector_extra_config": extra,
    }


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return free_ports(8)


@pytest.fixture(scope="module")
def alone(llava: Llava) -> EngineSpec:
    return EngineSpec(model=llava(SHAPE), images=4)


def endpoint(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def starts(spec: EngineSpec, role: str, port: int, **options: Any) -> EngineSpec:
    """The same engine as one side; a consumer's encoder raises."""
    config = embeds(f"ec_{role}", port, **options)
    return replace(spec, ec_transfer_config=config, encoder_raises=role == "consumer")


@pytest.fixture(scope="module", params=["local", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return the transport; module scope runs all tests of one transport before the other's."""
    return str(request.param)


@pytest.fixture
def sides(
    transport: str, alone: EngineSpec, engines: EngineShelf, ports: list[int]
) -> tuple[Engine, Engine]:
    """A producer and a consumer, with nothing in their caches."""
    first = 0 if transport == "local" else 2
    producer = engines.get(starts(alone, "producer", ports[first], transport=transport))
    consumer = engines.get(starts(alone, "consumer", ports[first + 1], transport=transport))
    for engine in (producer, consumer):
        engine.reset_encoder_cache()
    return producer, consumer


def endpoint_of(engine: Engine) -> str:
    config = engine.spec.ec_transfer_config
    assert config is not None
    return endpoint(config["ec_port"])


def test_images_go_through_a_window_of_three_rows(
    alone: EngineSpec, sides: tuple[Engine, Engine], engines: EngineShelf
) -> None:
    producer, consumer = sides
    (expected,) = engines.get(alone).generate(about(*IMAGES))
    (sent,) = producer.generate(about(*IMAGES, max_tokens=1))
    assert sent.ec_transfer_params is not None
    (actual,) = consumer.generate(
        about(*IMAGES, ec_transfer_params=sent.ec_transfer_params), timeout_s=TIMEOUT_S
    )
    same(actual, expected)
    assert consumer.images_encoded() == 0


def test_a_consumer_that_waits_idle_gets_what_a_proxy_has_sent_to_it(
    alone: EngineSpec, sides: tuple[Engine, Engine], engines: EngineShelf
) -> None:
    producer, consumer = sides
    images = [Image(seed=seed) for seed in (11, 12)]
    (expected,) = engines.get(alone).generate(about(*images))
    # As proxies for vLLM's own connector say it, to both sides at once.
    items = [{"mm_hash": None, "transfer_id": f"t{number}"} for number in range(len(images))]
    params = {"consumer_zmq": endpoint_of(consumer), "ec_items": items}
    prompt = about(*images, ec_transfer_params=params)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(consumer.generate, prompt, timeout_s=TIMEOUT_S)
        producer.generate(replace(prompt, max_tokens=1))
        (actual,) = waiting.result()
    same(actual, expected)
    assert consumer.images_encoded() == 0


def test_an_item_that_was_evicted_is_had_again(
    alone: EngineSpec, sides: tuple[Engine, Engine], engines: EngineShelf
) -> None:
    producer, consumer = sides
    prompt = about(Image(seed=31))
    (expected,) = engines.get(alone).generate(prompt)
    (sent,) = producer.generate(replace(prompt, max_tokens=1))
    told = replace(prompt, ec_transfer_params=sent.ec_transfer_params)
    for _ in range(2):
        consumer.reset_encoder_cache()
        assert consumer.reset_prefix_cache()
        (actual,) = consumer.generate(told, timeout_s=TIMEOUT_S)
        same(actual, expected)
    assert consumer.images_encoded() == 0


def test_what_nobody_offers_is_encoded_here(
    alone: EngineSpec, engines: EngineShelf, ports: list[int]
) -> None:
    spec = starts(alone, "consumer", ports[5], bootstrap_timeout_s=0.5)
    with Engine(replace(spec, encoder_raises=False), _log(engines, "fallback")) as consumer:
        prompt = about(Image(seed=51), ec_transfer_params={"peer": endpoint(ports[7])})
        (expected,) = engines.get(alone).generate(replace(prompt, ec_transfer_params=None))
        (actual,) = consumer.generate(prompt, timeout_s=TIMEOUT_S)
        same(actual, expected)
        assert consumer.images_encoded() == 1


def test_metadata_alone_and_variable_lengths(
    qwen2_vl: Qwen2VL, engines: EngineShelf, ports: list[int]
) -> None:
    alone = EngineSpec(model=qwen2_vl(QWEN_SHAPE), images=4, llm=NO_VIDEOS)
    (expected,) = engines.get(alone).generate(about(*QWEN_IMAGES))
    producer = engines.get(starts(alone, "producer", ports[5]))
    consumer = engines.get(
        starts(alone, "consumer", ports[6], bootstrap_timeout_s=2.0, peers=[endpoint(ports[5])])
    )
    (sent,) = producer.generate(about(*QWEN_IMAGES, max_tokens=1))
    assert sent.ec_transfer_params is not None
    encoded = [
        EncodedImage(name=name, grid=item["metadata"]["image_grid_thw"])
        for name, item in sent.ec_transfer_params.items()
    ]
    (actual,) = consumer.generate(
        about_encoded(*encoded, ec_transfer_params=sent.ec_transfer_params), timeout_s=TIMEOUT_S
    )
    same(actual, expected)
    # What nobody has and nobody can encode ends this request and no other.
    stranger = EncodedImage(name="unheard-of", grid=encoded[0].grid)
    (failed,) = consumer.generate(about_encoded(stranger), timeout_s=TIMEOUT_S)
    assert failed.finish_reason == "error"
    assert consumer.generate(about(seed=9))


def test_ranks_of_a_parallel_consumer(
    alone: EngineSpec, engines: EngineShelf, ports: list[int]
) -> None:
    prompt = about(*IMAGES[:2], seed=61)
    (expected,) = engines.get(alone).generate(prompt)
    consumer = engines.get(replace(starts(alone, "consumer", _two_in_a_row()), tp=2))
    producer = engines.get(starts(alone, "producer", ports[0]))
    (sent,) = producer.generate(replace(prompt, max_tokens=1))
    (actual,) = consumer.generate(
        replace(prompt, ec_transfer_params=sent.ec_transfer_params), timeout_s=TIMEOUT_S
    )
    same(actual, expected)


def test_encoder_prefill_and_decode(
    alone: EngineSpec, engines: EngineShelf, ports: list[int], tmp_path: Path
) -> None:
    store = pool(files(tmp_path), chunk_tokens=32)
    prompt = about(*IMAGES, seed=71, max_tokens=8)
    (expected,) = engines.get(alone).generate(prompt)
    prefill = engines.get(replace(starts(alone, "consumer", ports[1]), kv_transfer_config=store))
    encoder = engines.get(starts(alone, "producer", ports[0]))
    (sent,) = encoder.generate(replace(prompt, max_tokens=1))
    params = sent.ec_transfer_params
    told = replace(prompt, ec_transfer_params=params)
    prefill.generate(replace(told, max_tokens=1), timeout_s=TIMEOUT_S)
    decode = engines.get(replace(starts(alone, "consumer", ports[3]), kv_transfer_config=store))
    length = len(prompt.ids) + len(IMAGES) * (SHAPE.image_rows - 1)
    (actual,) = decode.generate(expecting(told, length // 32 * 32), timeout_s=TIMEOUT_S)
    same(actual, expected)
    assert actual.cached_tokens >= length // 32 * 32 - 32
    assert decode.images_encoded() == 0


def _two_in_a_row() -> int:
    """The first of two free ports that follow each other."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as following, contextlib.suppress(OSError):
            following.bind(("127.0.0.1", port + 1))
            return port


def _log(engines: EngineShelf, name: str) -> Path:
    return engines._directory / f"{name}.log"
