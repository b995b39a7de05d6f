"""Lets a torchvision whose own operators do not load be imported beside the CPU build of torch.

torchvision registers shape functions for two of its operators as it is imported, and fails where
they do not exist: the package index has builds for CUDA alone, whose library needs a CUDA torch.
Models of images need nothing of torchvision but that it imports, so the two are declared, without
kernels. Where torchvision's library did load (the builds of PyTorch's own index), nothing is done.

`kvpool_torchvision.pth` imports this as each Python of the environment starts, so that it also
holds in the processes that vLLM starts. It must cost nothing there: torch is not imported before
torchvision is. For tests only; not a part of the package.
"""

import sys

# The first that names operators; torchvision has tried to load its library before.
REGISTRATIONS = "torchvision._meta_registrations"
OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators:
    """Finds no module: looks on as they are asked for."""

    # Operators live as long as the library object they were declared with.
    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Declare what is missing, and leave the module to the other finders."""
        if name == REGISTRATIONS and cls.library is None:
            cls._declare()

    @classmethod
    def _declare(cls):
        import torch

        missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
        cls.library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            cls.library.define(name + SCHEMA)


sys.meta_path.insert(0, DeclareOperators)
