"""docs/reinforcement_learning.md: its loop runs, and each weights' answers are their own."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.pool import tokens
from tests.support.models import LlamaShape, add_tokenizer, make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GUIDE = Path(__file__).parents[2] / "docs" / "reinforcement_learning.md"
LIMIT_S = 500.0
VOCAB = 1024
# vLLM has no sleep mode on CPUs: it refuses the option, and ignores the calls.
SLEEPS = "enable_sleep_mode=True,"
SMALL = (
    'dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4, '
    "kv_cache_memory_bytes=64 << 20,"
)
STEPS = "range(100)"
SAMPLES = "max_tokens=512"
MODEL = '"Qwen/Qwen3-0.6B"'
BEFORE = """
import json
prompts = [{{"prompt_token_ids": {prompt}}}]
checkpoints = iter({checkpoints})
told = []


def train(answers):
    [answer] = answers
    told.append((answer.num_cached_tokens, list(answer.outputs[0].token_ids)))
    with open({told!r}, "w") as file:
        json.dump(told, file)
    return next(checkpoints)


"""


def loop() -> str:
    """Return the guide's lines of Python."""
    [block] = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return str(block)


def test_loop_of_the_guide_finds_the_cells_of_earlier_weights(tmp_path: Path) -> None:
    """Change the weights from A to B and back to A, with vLLM's engine in another process."""
    shape = LlamaShape(layers=2, vocab=VOCAB)
    first, second = (
        make_model(tmp_path / "models", each) for each in (shape, replace(shape, seed=7))
    )
    for model in (first, second):
        add_tokenizer(model, VOCAB)
    code = loop()
    for documented, own in (
        (MODEL, repr(str(first))),
        (STEPS, "range(3)"),
        (SAMPLES, "max_tokens=16, temperature=0.0"),
        (SLEEPS, SMALL),
    ):
        assert documented in code
        code = code.replace(documented, own)
    checkpoints = [str(second), str(first), str(first)]
    script, told = tmp_path / "loop.py", tmp_path / "told.json"
    prompt = tokens(seed=5, count=600)
    script.write_text(BEFORE.format(prompt=prompt, checkpoints=checkpoints, told=str(told)) + code)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (found, answer), (found_new, answer_new), (found_again, answer_again) = json.loads(
        told.read_text()
    )
    assert (found, found_new, found_again) == (0, 0, 512)
    assert answer_new != answer
    assert answer_again == answer
