"""What the end-to-end tests of images have in common."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.engine import EncodedImage, EngineSpec, Image, Prompt
from tests.support.models import IMAGE_TOKEN_ID

VOCAB = 1024
TEXT_TOKENS = 20


def about(*images: Image, seed: int = 0, **values: Any) -> Prompt:
    """A prompt with text before, between and after the images."""
    rng = random.Random(seed)
    ids = _text(rng)
    for _ in images:
        ids += [IMAGE_TOKEN_ID, *_text(rng)]
    return Prompt(ids=ids, images=images, **values)


def about_encoded(*images: EncodedImage, seed: int = 0, **values: Any) -> Prompt:
    """The prompt that `about` makes of as many images, without their pixels."""
    pixels = about(*(Image(seed=0) for _ in images), seed=seed, **values)
    return replace(pixels, images=(), encoded=images)


def shared_files(directory: Path, role: str) -> Mapping[str, Any]:
    """An `ec_transfer_config` of vLLM's own example: embeddings as files in `directory`."""
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def producer_and_consumer(
    alone: EngineSpec, config: Callable[[str], Mapping[str, Any]]
) -> tuple[EngineSpec, EngineSpec]:
    """An engine that only encodes, and one whose encoder raises; `config` is asked by role."""
    return (
        replace(alone, ec_transfer_config=config("ec_producer")),
        replace(alone, ec_transfer_config=config("ec_consumer"), encoder_raises=True),
    )


def _text(rng: random.Random) -> list[int]:
    return rng.choices(range(3, VOCAB), k=TEXT_TOKENS)
