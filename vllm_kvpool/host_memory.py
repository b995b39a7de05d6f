"""Memory of this host that the process may still take, and the check of what options ask for.

The kernel ends a process that takes more than its control group has (SIGKILL), so sizes are
compared at start. Groups may be of either version and nested; a group's limit counts for all within
it. The page cache counts as free, as the kernel takes it back first. Swap does not count: a cache
in swap is slower than none. `root` is where tests put files of the kernel's.
"""

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError

logger = logging.getLogger(__name__)

ROOT = Path("/")
HUGE_PAGE_BYTES = 2 << 20  # where the kernel does not say
CAP_IPC_LOCK = 14  # lets a process lock any amount


class MemoryLimit(NamedTuple):
    """Something that limits memory: its name in messages, its size and what is left of it."""

    name: str
    total_bytes: int
    left_bytes: int


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the machine's memory, as far as it is known, and the limits of the control groups."""
    known = meminfo(root)
    limits = [MemoryLimit("the machine", known["MemTotal"], known["MemAvailable"])]
    limits += _limits_of_groups(root)
    return [each for each in limits if each.total_bytes]


def meminfo(root: Path = ROOT) -> Mapping[str, int]:
    """Read `/proc/meminfo`: sizes in bytes, numbers of pages as they are; 0 for what it lacks."""
    found: Counter[str] = Counter()
    for name, value, unit in re.findall(
        r"^(\w+):\s+(\d+)( kB)?$", text_of(root / "proc/meminfo"), re.MULTILINE
    ):
        found[name] = int(value) << (10 if unit else 0)
    found["Hugepagesize"] = found["Hugepagesize"] or HUGE_PAGE_BYTES
    return found


def huge_pages_left(root: Path = ROOT) -> int:
    """Return the bytes of huge pages that control groups leave; `sys.maxsize` without a limit.

    A page beyond the limit can be mapped, and ends the process when it is touched (SIGBUS).
    """
    page = meminfo(root)["Hugepagesize"] >> 10
    size = f"{page >> 20}GB" if page >> 20 else f"{page >> 10}MB" if page >> 10 else f"{page}KB"
    left = sys.maxsize
    for group, is_unified in _groups("hugetlb", root):
        names = ("max", "current") if is_unified else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (_number(group / f"hugetlb.{size}.{name}") for name in names)
        if limit is not None and used is not None:
            left = min(left, max(limit - used, 0))
    return left


def worker_needs(
    arena: Mapping[str, int], stores: Mapping[str, int], *, has_host: bool, root: Path = ROOT
) -> dict[str, int]:
    """Return what a worker takes of the memory that is available, by option.

    Args:
        arena: parts of the arena, which lies in reserved huge pages if it has a host tier and they
            suffice. Such pages are not of the memory that is available.
        stores: memory of the stores' clients.
        has_host: True if the arena has a host tier.
        root: the root of the kernel's files.
    """
    pages = meminfo(root)
    huge = (pages["HugePages_Free"] - pages["HugePages_Rsvd"]) * pages["Hugepagesize"]
    is_aside = has_host and min(huge, huge_pages_left(root)) >= sum(arena.values())
    return dict(stores) if is_aside else {**arena, **stores}


def lockable_bytes(root: Path = ROOT) -> int:
    """Return what this process may lock (RLIMIT_MEMLOCK); `sys.maxsize` if any amount."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", text_of(root / "proc/self/status"), re.M)
    if capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1:
        return sys.maxsize
    limit = re.search(r"Max locked memory\s+(\d+)", text_of(root / "proc/self/limits"))
    return int(limit[1]) if limit else sys.maxsize


def check_memory(
    needs: Mapping[str, int],
    *,
    ranks: int = 1,
    grows: Mapping[str, int] | None = None,
    locked: Mapping[str, int] | None = None,
) -> None:
    """Raise ConfigError if options ask for more memory than there is, warn if they may in time.

    Args:
        needs: bytes that this process is about to take, by the option that sets them.
        ranks: processes of this host that each take as much, this one included.
        grows: bytes that it may take later, by option.
        locked: bytes that a network device keeps locked in this process, by option.
    """
    needed = sum(needs.values())
    for limit in memory_limits():
        if needed > limit.left_bytes or ranks * needed > limit.total_bytes:
            of_each = f" in each of {ranks} workers on this host" if ranks > 1 else ""
            raise ConfigError(
                f"{_named(needs)} of memory{of_each}, and {limit.name} has "
                f"{_mib(limit.total_bytes)}, of which {_mib(limit.left_bytes)} are free: the "
                f"process would be killed. Lower {_largest(needs)}, or give it more memory"
            )
        if grows and needed + sum(grows.values()) > limit.total_bytes:
            logger.warning(
                "kvpool: %s of memory in time, and %s has %s: the process is killed then; lower %s",
                _named({**needs, **grows}),
                limit.name,
                _mib(limit.total_bytes),
                _largest(grows),
            )
    lockable = lockable_bytes()
    if locked and sum(locked.values()) > lockable:
        raise ConfigError(
            f"{_named(locked)} of memory that RDMA locks, and this process may lock "
            f"{_mib(lockable)} (ulimit -l). Raise that (ulimit -l unlimited; docker run --ulimit "
            f"memlock=-1), or lower {_largest(locked)}"
        )


def _named(needs: Mapping[str, int]) -> str:
    parts = [f"{name} ({_mib(nbytes)})" for name, nbytes in needs.items() if nbytes]
    return f"{' and '.join(parts)} need {_mib(sum(needs.values()))}"


def _largest(needs: Mapping[str, int]) -> str:
    return max(needs, key=lambda name: needs[name])


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def _limits_of_groups(root: Path) -> Iterator[MemoryLimit]:
    for group, is_unified in _groups("memory", root):
        if is_unified:
            limit, used = _number(group / "memory.max"), _number(group / "memory.current")
            name, prefix = "memory.max", ""
        else:
            limit, used = (
                _number(group / f"memory.{each}_in_bytes") for each in ("limit", "usage")
            )
            name, prefix = "memory.limit_in_bytes", "total_"
        if limit is None or used is None:
            continue
        stat = dict(re.findall(r"^(\w+) (\d+)$", text_of(group / "memory.stat"), re.MULTILINE))
        # Of groups above, which a container does not see.
        limit = min(limit, int(stat.get("hierarchical_memory_limit", limit)))
        free = sum(int(stat.get(f"{prefix}{each}_file", 0)) for each in ("active", "inactive"))
        free += int(stat.get("slab_reclaimable", 0))
        group_path = "/" / group.relative_to(root)
        shown = os.fsencode(group_path).decode(errors="backslashreplace")
        left = min(max(limit - used + free, 0), limit)
        yield MemoryLimit(f"the control group ({shown}/{name})", limit, left)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of this process's control groups, each before the one around it.

    The second value is True for version 2.
    """
    for line in filter(None, text_of(root / "proc/self/cgroup").split("\n")):
        number, controllers, path = line.split(":", 2)
        is_unified = number == "0" and not controllers
        if not is_unified and controller not in controllers.split(","):
            continue
        for top, mounted in _mounts(controller, is_unified=is_unified, root=root):
            inside = Path(path).relative_to(mounted) if Path(path).is_relative_to(mounted) else ""
            group = top / inside
            while True:
                yield group, is_unified
                if group == top:
                    break
                group = group.parent


def _mounts(controller: str, *, is_unified: bool, root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each mount point of the controller's hierarchy, and the group that is mounted there."""
    for line in filter(None, text_of(root / "proc/self/mountinfo").split("\n")):
        mount, _, kind = (part.split(" ") for part in line.partition(" - "))
        if kind[0] == "cgroup2" if is_unified else controller in kind[-1].split(","):
            yield root / mount[4].lstrip("/"), mount[3]


def _number(path: Path) -> int | None:
    """Return a number in a file of the kernel's; None without one, and for "max"."""
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


def text_of(path: Path) -> str:
    """Return a file of the kernel's; "" without it.

    Names of mounts and processes in it may be any bytes.
    """
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
