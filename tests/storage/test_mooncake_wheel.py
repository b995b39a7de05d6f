"""Mooncake's wheel: advice by what is missing, and the transport that is used, without a master."""

import tomllib
from pathlib import Path

import pytest

from vllm_kvpool.storage.mooncake_wheel import advice, installed_wheels, transport, uses_rdma

EXTRAS = {
    "mooncake": "mooncake-transfer-engine",
    "mooncake-cuda13": "mooncake-transfer-engine-cuda13",
    "mooncake-npu": "mooncake-transfer-engine-npu",
    "mooncake-cpu": "mooncake-transfer-engine-non-cuda",
}
"""Extras of this package -> the wheel that each installs."""
CPU, CUDA = EXTRAS["mooncake-cpu"], EXTRAS["mooncake"]


def missing(library: str) -> ImportError:
    text = f"{library}: cannot open shared object file: No such file or directory"
    return ImportError(text)


@pytest.mark.parametrize(
    ("installed", "error", "words"),
    [
        (
            (),
            ModuleNotFoundError("No module named 'mooncake'"),
            "pip install 'vllm-kvpool[mooncake]'",
        ),
        ((CUDA,), missing("libcudart.so.12"), "pip install 'vllm-kvpool[mooncake-cpu]'"),
        ((CUDA,), missing("libcuda.so.1"), f"pip uninstall {CUDA}"),
        ((CPU,), missing("libibverbs.so.1"), "apt-get install libibverbs1"),
        ((CPU,), missing("librdmacm.so.1"), "apt-get install librdmacm1"),
        ((CPU,), missing("libnuma.so.1"), "apt-get install libnuma1"),
        ((CPU,), missing("libcurl.so.4"), "apt-get install libcurl4"),
        *(
            ((EXTRAS["mooncake-npu"],), missing(f"lib{name}.so"), "source its set_env.sh")
            for name in ("ascendcl", "llm_datadist", "metadef")  # all that the wheel links of CANN
        ),
        ((CPU,), missing("libfoo.so.3"), "install the library libfoo"),
        ((CPU,), ImportError("undefined symbol: _Z3foo"), f"--force-reinstall {CPU}"),
        ((CUDA, CPU), missing("libcudart.so.12"), f"pip uninstall {CUDA} {CPU}"),
    ],
)
def test_advice_is_about_what_is_missing(
    installed: tuple[str, ...], error: ImportError, words: str
) -> None:
    text = advice(error, installed)
    assert words in text
    assert str(error) in text
    assert ("apt-get" in text) == ("apt-get" in words)


def test_each_kind_of_wheel_has_its_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {
        name: values[0].partition(">=")[0]
        for name, values in extras.items()
        if name.startswith("mooncake")
    }
    assert found == EXTRAS


def test_the_wheel_of_this_environment_is_found() -> None:
    assert installed_wheels() == [CPU]


# Which transport


def host(root: Path, devices: tuple[str, ...] = (), *, opens: bool = True) -> Path:
    for name in devices:
        (root / "sys/class/infiniband" / name).mkdir(parents=True)
    (root / "dev/infiniband").mkdir(parents=True)
    (root / "dev/infiniband/rdma_cm").touch()
    if opens:
        (root / "dev/infiniband/uverbs0").touch()
    return root


@pytest.mark.parametrize(
    ("devices", "opens", "device", "used", "words"),
    [
        ((), False, "", "tcp", "no RDMA device"),
        (("mlx5_0",), False, "", "tcp", "no /dev/infiniband/uverbs*"),
        (("mlx5_0",), True, "", "rdma over mlx5_0", ""),
        (("mlx5_0", "mlx5_1"), True, "mlx5_1", "rdma over mlx5_1", ""),
        (("mlx5_0",), True, "mlx5_7", "rdma", "device=mlx5_7 is not on this host"),
    ],
)
def test_rdma_is_used_where_there_is_a_device_that_can_be_opened(
    devices: tuple[str, ...], opens: bool, device: str, used: str, words: str, tmp_path: Path
) -> None:
    root = host(tmp_path, devices, opens=opens)
    found, problem = transport("rdma", device, root)
    assert found == used
    assert uses_rdma("rdma", device, root) is (used != "tcp")
    assert words in problem
    assert bool(words) == bool(problem)


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "4: ACTIVE"])
def test_rdma_is_used_over_an_active_port_alone(state: str, tmp_path: Path) -> None:
    root = host(tmp_path, ("mlx5_0",))
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    is_active = state == "4: ACTIVE"
    assert uses_rdma("rdma", "", root) is is_active
    assert ("no port of mlx5_0 is active" in transport("rdma", "", root)[1]) is not is_active


def test_a_variable_that_forces_tcp_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    found, problem = transport("rdma", "", host(tmp_path, ("mlx5_0",)))
    assert (found, "MC_FORCE_TCP is set" in problem) == ("tcp", True)


def test_other_protocols_are_what_they_are_called(tmp_path: Path) -> None:
    assert transport("tcp", "", tmp_path) == ("tcp", "")
    assert not uses_rdma("tcp", "", tmp_path)
    assert transport("ascend", "", tmp_path) == ("ascend", "")
