"""vLLM's identifiers of images, on which keys rest, as docs/configuration.md describes them."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8))


def identifier(
    model: str,
    seed: int = 0,
    uuid: str | None = None,
    processor: Mapping[str, Any] | None = None,
    algorithm: Any = "sha256",
) -> str:
    items = MultiModalDataParser().parse_mm_data({"image": [picture(seed)]})
    inputs = ProcessorInputs(
        [1, 2], items, {"image": [uuid]}, hf_processor_mm_kwargs=processor or {}
    )
    takes_algorithm = "hash_algorithm" in inspect.signature(inputs.get_mm_hashes).parameters
    more = (algorithm,) if takes_algorithm else ()
    [found] = inputs.get_mm_hashes(model, *more)["image"]
    return found


def test_an_image_is_named_by_its_content_and_the_models_name() -> None:
    """The name is the path or hub name that the engine was given. Engines share by equal names."""
    assert identifier("/models/one") == identifier("/models/one")
    assert identifier("/models/one") != identifier("/models/one", seed=1)
    assert identifier("/models/one") != identifier("/mnt/one")


def test_an_identifier_of_the_clients_is_taken_as_it_is() -> None:
    assert identifier("/models/one", uuid="cat") == "cat"
    assert identifier("/mnt/one", seed=1, uuid="cat") == "cat"


def test_options_of_the_processor_join_an_identifier_with_the_models_name() -> None:
    options = {"do_normalize": False}
    one, other = (identifier(m, uuid="cat", processor=options) for m in ("/models/one", "/mnt/one"))
    assert len({one, other, "cat"}) == 3


def test_algorithms_name_images_differently() -> None:
    assert identifier("m") != identifier("m", algorithm="sha512")
