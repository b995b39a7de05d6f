"""Places of a model's weights and files, and the sample of weights that an engine has read."""

import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vllm_kvpool.identity.weights import (
    FOLDERS_OF_WEIGHTS,
    changed_ns,
    folders_in,
    known_sample,
)
from vllm_kvpool.vllm_adapt import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 16  # of one that is random

# Names in a model's configuration of other models, which it loads as parts of itself.
OTHER_MODELS = ("audio_model_id", "text_model_id")


def other_models(model: Any) -> dict[str, str]:
    """Return the models that one loads as parts of itself, by their names in its configuration."""
    named = ((name, getattr(model.hf_config, name, None)) for name in OTHER_MODELS)
    return {name: other for name, other in named if isinstance(other, str) and other}


class WeightSources(NamedTuple):
    """Sources of a model's weights: its directory or file, and its parts'."""

    model: str
    revision: str | None = None
    parts: tuple[str, ...] = ()
    download_dir: str | None = None
    """Directory of vLLM's downloads, if it is not Hugging Face's cache."""

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> Self:
        """Return the sources that an engine starts from."""
        model, download_dir = vllm_config.model_config, vllm_config.load_config.download_dir
        parts = tuple(other_models(model).values())
        return cls(str(model.model), model.revision, parts, download_dir)

    def moved_to(self, path: str) -> Self:
        """Return the sources of a reload from another path; parts stay where they are."""
        if path == self.model:
            return self._replace(revision=None)
        own = local_directory(self.model, self.revision, self.download_dir)
        folders = folders_in(own, FOLDERS_OF_WEIGHTS) if own is not None else []
        parts = (*self.parts, *map(str, folders))
        return self._replace(model=path, revision=None, parts=parts)

    def places(self) -> list[Path] | None:
        """Return the directories and files, the model's first; None if one is not local."""
        named = [(self.model, self.revision), *((part, None) for part in self.parts)]
        found = [local_weights(name, revision, self.download_dir) for name, revision in named]
        return None if None in found else [each for each in found if each is not None]


def sample_at_start(path: Path) -> str | None:
    """Return the sample of weights that an engine has just read from files; None without files.

    A directory of the user's may have been written to since the engine read it. Then which weights
    it has is not known, and the sample is random. Raises OSError.
    """
    began_ns = compat.engine_began_ns()
    is_hubs = path.parent.name == "snapshots"  # its files never change
    if began_ns is None or is_hubs or changed_ns(path) < began_ns:
        return known_sample(path)
    if (path, began_ns) not in _changed:
        _changed[path, began_ns] = secrets.token_hex(SAMPLE_BYTES)
        logger.warning(
            "kvpool: the weights in %s were written after this engine began to start, so it may "
            "have read others: it shares nothing with other engines; restart it, or set weights_id",
            path,
        )
    return _changed[path, began_ns]


_changed: dict[tuple[Path, int], str] = {}
"""Weights that changed while an engine started, and when it began -> what they count as."""


def local_weights(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the directory or file of a model's weights, without network access.

    `download_dir` is of vLLM's `LoadConfig`, which it reads weights from and nothing else.
    """
    path = Path(name)
    return path if path.is_file() else local_directory(name, revision, download_dir)


def local_directory(name: str, revision: str | None, cache_dir: str | None = None) -> Path | None:
    """Return the directory of a model's or an adapter's files, without network access.

    `cache_dir`: None is Hugging Face's own.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if compat.downloads_from_modelscope():
        return None  # Hugging Face's cache may have others under this name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return Path(found)
