"""Leaves the tests of the emulated device to its own environment (`make test-ascend`)."""

from importlib.util import find_spec

from tests.support.left_out import left_out

NAMES = (
    *("test_copier.py", "test_device.py", "test_mooncake.py", "test_multi_connector.py"),
    *("test_ops.py", "test_options.py", "test_specs.py"),
)
OWN_FILES = left_out(__file__, *NAMES)
collect_ignore = [] if find_spec("torch_npu") is not None else OWN_FILES
