"""Mooncake's wheel on this host: why it does not load, and the transport that it uses.

Every kind of wheel has the same module, so the one that is installed last lies over the others.
"""

import os
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from vllm_kvpool.config import environment

DISTRIBUTION = "mooncake-transfer-engine"
FORCE_TCP_NAME = "MC_FORCE_TCP"

_KINDS = "'vllm-kvpool[mooncake]' (CUDA 12), [mooncake-cuda13], [mooncake-npu] or [mooncake-cpu]"
_PACKAGES = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
}
"""Libraries of the system -> their packages on Debian and Ubuntu."""

_OF_CUDA = re.compile(r"lib(cudart|cuda|cufile|nvidia|nccl|cublas)")
_OF_ASCEND = re.compile(r"lib(ascend|hccl|hccn|acl|runtime|graph|ge_|hcomm|llm_datadist|metadef)")
_LIBRARY = re.compile(r"\b(lib[\w+-]+)\.so[\w.]*")


def advice(error: ImportError, installed: Sequence[str]) -> str:
    """Return what to do about a wheel that cannot be imported, by what is missing.

    `installed`: the names of all wheels of Mooncake that are installed.
    """
    if not installed:
        return f"mooncake:// needs Mooncake's wheel ({error}); run: pip install {_KINDS}"
    if len(installed) > 1:
        return (
            f"Mooncake's wheel cannot be loaded ({error}): {', '.join(installed)} are installed "
            f"over each other; run: pip uninstall {' '.join(installed)}; then pip install one of "
            f"{_KINDS}"
        )
    [wheel] = installed
    found = _LIBRARY.search(str(error))
    library = found[1] if found else ""
    trouble = f"Mooncake's wheel {wheel} cannot be loaded ({error})"
    for name, package in _PACKAGES.items():
        if library.startswith(name):
            return f"{trouble}; on Debian and Ubuntu run: apt-get install {package}"
    if _OF_CUDA.match(library):
        return (
            f"{trouble}: {library} belongs to CUDA. On a machine without it run: pip uninstall "
            f"{wheel}; pip install 'vllm-kvpool[mooncake-cpu]'. With CUDA 13 install "
            "[mooncake-cuda13] instead, which has another version of the library"
        )
    if _OF_ASCEND.match(library):
        return (
            f"{trouble}: {library} belongs to Ascend's CANN; source its set_env.sh, or on a "
            f"machine without it run: pip uninstall {wheel}; "
            "pip install 'vllm-kvpool[mooncake-cpu]'"
        )
    if library:
        return f"{trouble}: install the library {library}, or the wheel for this machine: {_KINDS}"
    return f"{trouble}; run: pip install --force-reinstall {wheel}"


def installed_wheels() -> list[str]:
    """Return the names of Mooncake's wheels in this environment."""
    names = (each.metadata["Name"] or "" for each in metadata.distributions())
    lowered = {name.lower().replace("_", "-") for name in names}
    return sorted(name for name in lowered if name.startswith(DISTRIBUTION))


def transport(protocol: str, device: str, root: Path = Path("/")) -> tuple[str, str]:
    """Return the transport that Mooncake uses on this host, and what is wrong with that.

    The second value is "" if the transport is the one that the URL names. Over `rdma` Mooncake uses
    TCP, and says so in its own log alone, where it finds no device that it can open. What the
    kernel says is read below `root`.
    """
    if protocol != "rdma":
        return protocol, ""
    if environment().get(FORCE_TCP_NAME) is not None:
        return "tcp", f"{FORCE_TCP_NAME} is set, with which Mooncake uses TCP alone; unset it"
    names = sorted(each.name for each in _entries(root / "sys/class/infiniband"))
    write = "or write protocol=tcp into the URL"
    if not names:
        return "tcp", (
            "this host has no RDMA device (/sys/class/infiniband), so Mooncake uses TCP; load the "
            f"driver, or give the container the devices, {write}"
        )
    nodes = [each for each in _entries(root / "dev/infiniband") if each.name.startswith("uverbs")]
    if not any(os.access(each, os.R_OK | os.W_OK) for each in nodes):
        return "tcp", (
            f"this process cannot open {', '.join(names)} (no /dev/infiniband/uverbs* that "
            "it may read and write), so "
            f"Mooncake uses TCP; give the container /dev/infiniband, {write}"
        )
    wanted = [each.strip() for each in device.split(",") if each.strip()]
    if missing := [each for each in wanted if each not in names]:
        return "rdma", (
            f"device={','.join(missing)} is not on this host, which has {', '.join(names)}"
        )
    chosen = wanted or names
    used = [each for each in chosen if _may_be_active(root / "sys/class/infiniband" / each)]
    if not used:
        return "tcp", (
            f"no port of {', '.join(chosen)} is active (/sys/class/infiniband/*/ports/*/state), so "
            f"Mooncake uses TCP; connect one, {write}"
        )
    return f"rdma over {', '.join(used)}", ""


def uses_rdma(protocol: str, device: str, root: Path = Path("/")) -> bool:
    """Return True if Mooncake goes over RDMA on this host, and so locks the memory it registers."""
    return transport(protocol, device, root)[0].startswith("rdma")


def _may_be_active(device: Path) -> bool:
    """Return False if the kernel says that no port of the device is active."""
    try:
        states = [(port / "state").read_text() for port in _entries(device / "ports")]
    except OSError:
        return True
    return not states or any(state.startswith("4:") for state in states)  # 4: ACTIVE


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
