"""Imported by the process that engines are forked from, and by nobody else.

Imports what is slow to import and compiles what is slow to compile. The Mooncake wheel is left out:
importing it starts threads, which a fork does not take along.
"""

import gc

import torch

import vllm_kvpool.storage.file.store
import vllm_kvpool.storage.mooncake  # noqa: F401 - imports the wheel only when a store is opened
from tests.soak import child  # noqa: F401
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.staging.copy_cpu import CpuCopier

CpuCopier([from_token_content(torch.zeros((1, 1, 1, 1), dtype=torch.int64))]).warm_up()
gc.freeze()  # no collection in an engine looks at all this again
