"""Findings of `kvpool doctor` about a machine, from its kernel's files."""

import base64
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import tests.support.memory_store  # noqa: F401  (its scheme)
from vllm_kvpool.cli.doctor import MOONCAKE_HUGE_PAGES, Finding, Status, examine_machine
from vllm_kvpool.config import read_config
from vllm_kvpool.storage.tiers import parse_tiers, tier_specs

MEMINFO = """\
MemTotal:       24684084 kB
MemAvailable:   20000000 kB
HugePages_Total:    {total}
HugePages_Free:     {free}
Hugepagesize:       2048 kB
"""
THP = "sys/kernel/mm/transparent_hugepage"
MADVISE = {f"{THP}/enabled": "always [madvise] never\n"}
NEVER = {f"{THP}/enabled": "always madvise [never]\n"}
LOCKED = "Max locked memory         {0}              {0}              bytes     \n"
GROUP = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "30 23 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
    "sys/fs/cgroup/memory.max": f"{4 << 30}\n",
    "sys/fs/cgroup/memory.current": "1024\n",
}
NVIDIA = {"proc/driver/nvidia/version": "NVRM version: 580\n"}
RDMA = "mooncake://127.0.0.1:1?protocol=rdma&segment=1GiB"
DEVICES = {"sys/class/infiniband/mlx5_0/node_type": "1: CA\n", "dev/infiniband/uverbs0": ""}
HOST = "host://8GiB"
NUM_PAGES = 4096 + 128  # for host memory and 256 MiB of staging


def pages(total: int, free: int) -> dict[str, str]:
    return {"proc/meminfo": MEMINFO.format(total=total, free=free)}


def found(root: Path, files: Mapping[str, str], *urls: str, **options: object) -> list[Finding]:
    """The findings about a machine with these files."""
    for name, content in {**pages(0, 0), **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    config = read_config({"store": list(urls), "staging_bytes": "256MiB", **options}, {})
    return [*examine_machine(config, parse_tiers(urls, environ={}), root)]


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        (MADVISE, Status.OK, "transparent ones, as none are reserved (each worker takes "),
        (MADVISE, Status.OK, f"sysctl vm.nr_hugepages={NUM_PAGES} or more"),
        (MADVISE | {f"{THP}/shmem_enabled": "advise [never]"}, Status.OK, "advise in shmem_ena"),
        (NEVER, Status.WARNING, "transparent ones are off: write madvise to /sys/kernel/mm/"),
        ({}, Status.WARNING, "transparent ones are off"),
        (pages(9000, 9000), Status.OK, "17.58 GiB are reserved and free"),
        (pages(9000, 4000), Status.WARNING, f"sysctl vm.nr_hugepages={9000 + NUM_PAGES} or more"),
    ],
)
def test_huge_pages_of_host_memory(
    tmp_path: Path, files: Mapping[str, str], status: Status, words: str
) -> None:
    [each] = [each for each in found(tmp_path, files, HOST) if each.check == "huge pages"]
    assert each.status is status
    assert words in each.text


def test_memory_that_only_passes_through_needs_no_huge_pages(tmp_path: Path) -> None:
    assert not [each for each in found(tmp_path, NEVER, "memory://x") if "huge" in each.check]


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, Status.OK, "takes 8.25 GiB; 19.07 GiB are available"),
        (GROUP, Status.FAILED, "takes 8.25 GiB; 4 GiB are available; lower host://"),
        (
            GROUP
            | {"sys/fs/cgroup/memory.current": f"{3 << 30}\n"}
            | {"sys/fs/cgroup/memory.stat": f"anon 5\nactive_file 7\ninactive_file {2 << 30}\n"},
            Status.FAILED,
            "3 GiB are available",
        ),
        (GROUP | {"sys/fs/cgroup/memory.max": "max\n"}, Status.OK, "19.07 GiB are available"),
    ],
)
def test_host_memory_fits_into_the_machine_and_its_container(
    tmp_path: Path, files: Mapping[str, str], status: Status, words: str
) -> None:
    [each] = [each for each in found(tmp_path, files, HOST) if each.check == "memory"]
    assert each.status is status
    assert words in each.text


@pytest.mark.parametrize(
    ("files", "url", "options", "status", "words"),
    [
        (GROUP, "memory://x", {"staging_bytes": "5GiB"}, Status.FAILED, "lower staging_bytes"),
        (GROUP, RDMA.replace("1GiB", "5GiB"), {}, Status.FAILED, "lower segment= of mooncake"),
        (GROUP, RDMA, {}, Status.OK, "takes 1.266 GiB; 4 GiB are available"),
        (GROUP | pages(9000, 9000), HOST, {}, Status.OK, "takes 0 B; 4 GiB are available"),
    ],
)
def test_memory_of_a_worker_is_what_its_engine_compares(
    tmp_path: Path,
    files: Mapping[str, str],
    url: str,
    options: Mapping[str, object],
    status: Status,
    words: str,
) -> None:
    """Staging and the stores' clients count without host memory, reserved huge pages do not."""
    [each] = [each for each in found(tmp_path, files, url, **options) if each.check == "memory"]
    assert each.status is status
    assert words in each.text


def test_peers_that_are_no_hosts_are_a_failure(tmp_path: Path) -> None:
    told = [
        each for each in found(tmp_path, {}, HOST, allowed_peers=["!!"]) if each.check == "options"
    ]
    assert [each.status for each in told] == [Status.FAILED]
    assert "allowed_peers: '!!' is not a host" in told[0].text


@pytest.mark.parametrize(
    ("url", "devices", "limit", "is_named"),
    [
        (RDMA, DEVICES, f"{8 << 20}", True),
        (RDMA, DEVICES, f"{2 << 30}", False),
        (RDMA, DEVICES, "unlimited", False),
        (RDMA, {}, f"{8 << 20}", False),  # Mooncake goes over TCP
        (RDMA.replace("rdma", "tcp"), DEVICES, f"{8 << 20}", False),
    ],
)
def test_rdma_locks_what_mooncake_registers(
    tmp_path: Path, url: str, devices: Mapping[str, str], limit: str, is_named: bool
) -> None:
    files = {"proc/self/limits": LOCKED.format(limit), **devices}
    told = [each.text for each in found(tmp_path, files, url) if "may lock" in each.text]
    assert bool(told) is is_named
    for text in told:
        assert "may lock 8 MiB of memory, and RDMA registers 1.25 GiB" in text
        assert "ulimit -l unlimited" in text


def test_huge_pages_that_mooncake_is_told_to_take_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MOONCAKE_HUGE_PAGES, "1")
    [told] = [each for each in found(tmp_path, {}, RDMA) if MOONCAKE_HUGE_PAGES in each.text]
    assert told.status is Status.WARNING
    assert "segment=1 GiB does not fit into the 0 B of huge pages that are free" in told.text
    assert not [each for each in found(tmp_path, pages(512, 512), RDMA) if "fit" in each.text]


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, Status.OK, "no GPU"),
        (NVIDIA, Status.OK, "no GPU: there is a driver of NVIDIA, and this process was started"),
        ({"dev/nvidiactl": ""}, Status.WARNING, "there is a GPU, and torch cannot use it"),
        ({"dev/davinci_manager": ""}, Status.OK, "an Ascend NPU; its copies are not tried here"),
    ],
)
def test_a_machine_without_a_gpu_is_no_failure(
    tmp_path: Path, files: Mapping[str, str], status: Status, words: str
) -> None:
    [each] = [each for each in found(tmp_path, files, HOST) if each.check == "GPU copies"]
    assert each.status is status
    assert each.text.startswith(words)


def test_keys_are_got_as_a_worker_gets_them_and_shown_by_their_ids(tmp_path: Path) -> None:
    keys = [base64.b64encode(bytes([number]) * 32).decode() for number in range(2)]
    (tmp_path / "keys").write_text("\n".join(keys))
    (tmp_path / "keys").chmod(0o600)
    option = {"encryption_key_file": str(tmp_path / "keys")}
    [each] = [each for each in found(tmp_path, {}, HOST, **option) if each.check == "encryption"]
    assert each.status is Status.OK
    assert re.fullmatch(
        r"cells are encrypted with key (\w{8}); those of \1, \w{8} are read", each.text
    )
    assert not any(key in each.text for key in keys)
    option = {"encryption_key_file": str(tmp_path / "none")}
    [each] = [each for each in found(tmp_path, {}, HOST, **option) if each.check == "encryption"]
    assert each.status is Status.FAILED
    assert each.text.endswith("none cannot be read: No such file or directory")
    assert not [each for each in found(tmp_path, {}, HOST) if each.check == "encryption"]


def test_the_transport_of_mooncake_is_named(tmp_path: Path) -> None:
    """Mooncake goes over TCP where it finds no RDMA device, and says so in its own log alone."""
    config = read_config({"store": ["mooncake://m:1?protocol=rdma"]})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    found = list(examine_machine(config, tier_specs(config), tmp_path))
    [told] = [each for each in found if "transport" in each.text]
    assert told.status is Status.WARNING
    assert "transport tcp, not as the URL says (protocol=rdma): this host has no RDMA" in told.text


def test_options_without_effect_are_named(tmp_path: Path) -> None:
    config = read_config({"store": ["file:///x?size=1GiB"], "write_policy": "back"})
    found = list(examine_machine(config, tier_specs(config), tmp_path))
    assert any("write_policy=back has no effect" in each.text for each in found)
