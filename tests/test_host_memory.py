"""Memory left by the machine, its control groups and its limits, and checks against it."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from vllm_kvpool import host_memory
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.host_memory import (
    check_memory,
    huge_pages_left,
    lockable_bytes,
    memory_limits,
)

GIB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\nHugepagesize: 2048 kB\n"
UNIFIED = "30 23 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
FIRST = "32 31 0:29 {0} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
FIRST_HUGE = "33 31 0:30 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n"
ROOTLESS = "9:cpu:/other\n4:memory:{0}\n0::/ignored\n"
UNLIMITED = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 32 GiB, of which 24 are free."""
    write(tmp_path, {"proc/meminfo": MEMINFO})
    for name in ("memory_limits", "lockable_bytes"):
        real = getattr(host_memory, name)
        monkeypatch.setattr(host_memory, name, lambda real=real: real(tmp_path))
    return tmp_path


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{str(content).rstrip()}\n")


def unified(directory: str, limit: object, used: int, stat: str = "") -> dict[str, object]:
    at = f"sys/fs/cgroup{directory}"
    files = {f"{at}/memory.max": limit, f"{at}/memory.current": used, f"{at}/memory.stat": stat}
    return {"proc/self/mountinfo": UNIFIED, **files}


def first(directory: str, limit: int, used: int, stat: str = "") -> dict[str, object]:
    at = f"sys/fs/cgroup/memory{directory}"
    names = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"{at}/memory.{name}": value for name, value in names.items()}


def left(root: Path) -> list[tuple[float, float]]:
    """Return (total, left) of each limit in GiB, starting with the machine's."""
    return [(each.total_bytes / GIB, each.left_bytes / GIB) for each in memory_limits(root)]


def test_limit_of_a_machine_is_what_is_available(root: Path) -> None:
    assert left(root) == [(32, 24)]


def test_limits_of_unified_groups_are_of_all_around_the_process(root: Path) -> None:
    """Also where a group of a container has no limit, and the pod around it has."""
    write(root, {"proc/self/cgroup": "0::/pod/container"})
    write(root, unified("/pod/container", "max", GIB))
    write(root, unified("/pod", 4 * GIB, 3 * GIB, f"anon 1\ninactive_file {GIB}\nactive_file 0"))
    assert left(root) == [(32, 24), (4, 2)]
    write(root, unified("/pod/container", 3 * GIB, 2 * GIB))
    assert left(root) == [(32, 24), (3, 1), (4, 2)]


@pytest.mark.parametrize(
    "name", [b"caf\xe9", b"a\x85b", b"a\xc2\xa0b", b"a\xe2\x80\xa8b", b"a\x0cb"]
)
def test_limits_beside_a_mount_of_any_name_are_found(root: Path, name: bytes) -> None:
    """Names of mounts are bytes; the kernel escapes blanks and ends of lines of ASCII alone."""
    write(root, {"proc/self/cgroup": "0::/pod"})
    write(root, unified("/pod", 4 * GIB, 3 * GIB))
    mounts = root / "proc/self/mountinfo"
    line = b"31 23 0:28 / /mnt/" + name + b" rw - cifs //nas/" + name + b" rw\n"
    mounts.write_bytes(line + mounts.read_bytes())
    assert left(root) == [(32, 24), (4, 1)]


def test_limits_of_first_version_groups_are_found_from_within_a_container(root: Path) -> None:
    """A container sees its own group at the mount's root; of outer groups it sees only a number."""
    write(root, {"proc/self/cgroup": ROOTLESS.format("/docker/1f")})
    write(root, {"proc/self/mountinfo": FIRST.format("/docker/1f")})
    write(root, first("", UNLIMITED, GIB, f"hierarchical_memory_limit {3 * GIB}"))
    assert left(root) == [(32, 24), (3, 2)]


def test_limits_of_nested_first_version_groups_all_count(root: Path) -> None:
    write(
        root,
        {"proc/self/cgroup": ROOTLESS.format("/a/b"), "proc/self/mountinfo": FIRST.format("/")},
    )
    write(root, first("/a/b", 8 * GIB, GIB, f"total_inactive_file {GIB // 2}\ninactive_file 0"))
    write(root, first("/a", 2 * GIB, GIB))
    assert left(root) == [(32, 24), (8, 7.5), (2, 1)]


def test_limit_of_an_unknown_kernel_is_none(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    assert (huge_pages_left(tmp_path), lockable_bytes(tmp_path)) == (sys.maxsize, sys.maxsize)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/pod/hugetlb.2MB.max": "max"}, sys.maxsize),
        ({"sys/fs/cgroup/pod/hugetlb.2MB.max": 0}, 0),
        ({"sys/fs/cgroup/pod/hugetlb.2MB.max": 3 * GIB}, 2 * GIB),
        ({"sys/fs/cgroup/pod/hugetlb.1GB.max": 0}, sys.maxsize),
    ],
)
def test_huge_pages_left_are_those_of_the_group(
    root: Path, files: Mapping[str, object], expected: int
) -> None:
    """Kubernetes gives none to a container that asks for none; a page more would end it."""
    write(root, {"proc/self/cgroup": "0::/pod", "proc/self/mountinfo": UNIFIED, **files})
    for size in ("2MB", "1GB"):
        write(root, {f"sys/fs/cgroup/pod/hugetlb.{size}.current": GIB})
    assert huge_pages_left(root) == expected


def test_huge_pages_left_are_those_of_a_first_version_group(root: Path) -> None:
    write(root, {"proc/self/cgroup": "8:hugetlb:/x", "proc/self/mountinfo": FIRST_HUGE})
    at = "sys/fs/cgroup/hugetlb/x/hugetlb.2MB"
    write(root, {f"{at}.limit_in_bytes": 5 * GIB, f"{at}.usage_in_bytes": GIB})
    assert huge_pages_left(root) == 4 * GIB


@pytest.mark.parametrize(
    ("limit", "capabilities", "expected"),
    [("8388608", "0", 8 << 20), ("unlimited", "0", sys.maxsize), ("8388608", "4000", sys.maxsize)],
)
def test_lockable_bytes_are_the_limit_unless_the_process_may_lock_any(
    root: Path, limit: str, capabilities: str, expected: int
) -> None:
    write(root, {"proc/self/limits": f"Max locked memory         {limit}   {limit}   bytes"})
    write(root, {"proc/self/status": f"CapPrm: 0\nCapEff:\t{capabilities:0>16}"})
    assert lockable_bytes(root) == expected


@pytest.mark.usefixtures("root")
def test_check_of_more_than_the_machine_has_names_the_option() -> None:
    check_memory({"host://": 23 * GIB, "staging_bytes": GIB})
    expected = (
        r"staging_bytes \(256 MiB\) and host:// \(204800 MiB\) need 205056 MiB of memory, and the "
        r"machine has 32768 MiB, of which 24576 MiB are free: .* Lower host://"
    )
    with pytest.raises(ConfigError, match=expected):
        check_memory({"staging_bytes": 256 << 20, "host://": 200 * GIB})


def test_check_in_a_container_is_of_its_limit(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/"} | unified("", 3 * GIB, GIB))
    check_memory({"host://": 2 * GIB, "segment=": 0})
    expected = r"host:// .* need 6144 MiB .* group \(/sys/fs/cgroup/memory.max\) has 3072 MiB"
    with pytest.raises(ConfigError, match=expected):
        check_memory({"host://": 6 * GIB, "segment=": 0})


@pytest.mark.usefixtures("root")
def test_check_of_several_workers_is_of_their_sum() -> None:
    """Other workers may have allocated already, so the sum is compared with the total memory."""
    check_memory({"host://": 8 * GIB}, ranks=4)
    with pytest.raises(ConfigError, match="in each of 4 workers on this host, and the machine"):
        check_memory({"host://": 9 * GIB}, ranks=4)


@pytest.mark.usefixtures("root")
def test_check_of_what_grows_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_memory({"arena_bytes": GIB}, grows={"max_landing_bytes": 30 * GIB})
        assert not caplog.records
        check_memory({"arena_bytes": 3 * GIB}, grows={"max_landing_bytes": 30 * GIB})
    assert "lower max_landing_bytes" in caplog.text


def test_check_of_locked_memory_names_the_limit_and_the_option(root: Path) -> None:
    write(root, {"proc/self/limits": "Max locked memory         8388608   8388608   bytes"})
    check_memory({"host://": GIB})
    with pytest.raises(ConfigError, match=r"may lock 8 MiB \(ulimit -l\).*lower host://"):
        check_memory({"host://": GIB}, locked={"host://": GIB, "staging_bytes": 1 << 20})
