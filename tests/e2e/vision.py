"""Helpers of the end-to-end tests with images."""

import random
from dataclasses import replace
from typing import Any

from tests.e2e.engine import EncodedImage, Image, Prompt
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


def _text(rng: random.Random) -> list[int]:
    return rng.choices(range(3, VOCAB), k=TEXT_TOKENS)
