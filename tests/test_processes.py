"""The processes that run tests."""

import os

import torch


def test_process_of_tests_computes_with_one_thread_unless_told_otherwise() -> None:
    """Four processes of two threads each would wait for two cores in every operator of torch."""
    assert torch.get_num_threads() == int(os.environ.get("OMP_NUM_THREADS", "1"))
