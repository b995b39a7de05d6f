"""The import hook that `make setup` installs, so that engines can run models of images."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HOOKS = Path(__file__).parent / "hooks"

IMPORTS = """
import sys
assert "kvpool_torchvision" in sys.modules
assert "torch" not in sys.modules, "each start of Python would cost a second"
import torchvision, torch
print(torch.ops.torchvision.nms.default, torch.ops.torchvision.qnms.default)
"""

OPERATORS_OF_ANOTHER = """
import torch, kvpool_torchvision as hook
library = torch.library.Library("torchvision", "FRAGMENT")
for name in hook.OPERATORS:
    library.define(name + hook.SCHEMA)
    library.impl(name, lambda dets, scores, iou_threshold: dets + 1, "CPU")
hook.DeclareOperators.find_spec(hook.REGISTRATIONS)
print(torch.ops.torchvision.nms(torch.ones(1), torch.ones(1), 0.5).item())
"""


def fresh(code: str) -> str:
    """The output of a Python of this environment that runs nothing else."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_process_can_import_torchvision() -> None:
    assert fresh(IMPORTS) == "torchvision.nms.default torchvision.qnms.default"


def test_operators_that_exist_stay_as_they_are() -> None:
    assert fresh(OPERATORS_OF_ANOTHER) == "2.0"


def test_the_environment_has_the_hook_of_this_checkout() -> None:
    spec = importlib.util.find_spec("kvpool_torchvision")
    assert spec is not None
    assert spec.origin is not None
    for suffix in (".py", ".pth"):
        installed = Path(spec.origin).with_suffix(suffix)
        assert installed.read_text() == (HOOKS / installed.name).read_text(), "run make setup"
