"""Wheel and sdist: complete, of one version, of use in an environment that has nothing else."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from vllm_kvpool import __version__

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / os.environ.get("TOOLS_VENV", ".venv-tools") / "bin"  # scripts/setup-tools.sh
LIMIT_S = 300.0
# Of the extras, those that need no accelerator and no vLLM.
EXTRAS = "encryption,otel,router,s3,serve,top"


def call(*command: str | Path, status: int = 0, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert "Traceback" not in output
    return output


def build(source: Path, target: Path, *kind: str) -> list[Path]:
    call(sys.executable, "-m", "hatchling", "build", "-d", target, *kind, cwd=source)
    return sorted(target.iterdir())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"))
    return wheel, sdist


def environment(folder: Path, what: str) -> Path:
    """The programs of a new environment in which only `what` was installed."""
    call(sys.executable, "-m", "venv", folder)
    programs = folder / "bin"
    # What lies in the working directory is not to be found instead.
    call(programs / "python", "-m", "pip", "install", "--quiet", what, cwd=folder)
    return programs


def test_the_descriptions_are_accepted_by_an_index(files: tuple[Path, Path]) -> None:
    said = call(TOOLS / "twine", "check", "--strict", *files)
    assert said.count("PASSED") == 2


def test_all_name_one_version(files: tuple[Path, Path]) -> None:
    wheel, sdist = files
    assert wheel.name == f"vllm_kvpool-{__version__}-py3-none-any.whl"
    assert sdist.name == f"vllm_kvpool-{__version__}.tar.gz"
    configs = [path for path in (ROOT / "configs").rglob("*") if path.is_file()]
    named = {
        found
        for path in configs
        for found in re.findall(r"kvpool/vllm-openai:(\S+?)-vllm", path.read_text())
    }
    assert named == {__version__}


def test_the_sdist_has_what_builds_and_tests_it(files: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = files
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("CHANGELOG.md", "configs", "docs", "examples", "requirements", "scripts", "tests"):
        assert (source / name).exists(), name
    (again,) = build(source, tmp_path / "dist", "-t", "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert [(f.filename, f.CRC) for f in one.infolist()] == [
            (f.filename, f.CRC) for f in other.infolist()
        ]


def test_the_wheel_alone_says_what_its_commands_lack(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    kvpool = environment(tmp_path / "env", str(files[0])) / "kvpool"
    store = f"file://{tmp_path}/store"
    assert __version__ in call(kvpool, "--version")
    for command in re.findall(r"^  (\w+)  ", call(kvpool, "--help"), re.MULTILINE):
        call(kvpool, command, "--help")
    assert "1 MiB put in" in call(kvpool, "doctor", "--store", store)
    assert "empty" in call(kvpool, "inspect", "--store", store)
    config = ROOT / "configs" / "router.toml"
    for extra, arguments in (
        ("router", ("router", "--config", config, "--check")),
        ("serve", ("serve", "--store", store)),
        ("top", ("top", "http://127.0.0.1:1")),
    ):
        assert f"pip install 'vllm-kvpool[{extra}]'" in call(kvpool, *arguments, status=1)


def test_the_wheel_with_extras_runs_the_router(files: tuple[Path, Path], tmp_path: Path) -> None:
    programs = environment(tmp_path / "env", f"{files[0]}[{EXTRAS}]")
    config = ROOT / "configs" / "router.toml"
    said = call(programs / "kvpool", "router", "--config", config, "--check")
    assert said == f"{config} is valid\n"
    modules = "cli.top, cli.serve, router.run, storage.s3, storage.contents.encryption"
    imported = "; ".join(f"import vllm_kvpool.{name.strip()}" for name in modules.split(","))
    call(programs / "python", "-c", imported, cwd=tmp_path)
