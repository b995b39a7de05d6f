"""Changes of an engine's weights: the calls that report them, the receivers, and the name."""

import functools
import gc
import inspect
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm
from safetensors.numpy import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore as VllmEngineCore
from vllm.v1.engine.core import EngineCoreProc

from tests.support.models import LlamaShape, make_model
from tests.support.releases import since
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.identity.weights import FOLDERS_OF_WEIGHTS
from vllm_kvpool.vllm_adapt.identity import weights_version
from vllm_kvpool.vllm_adapt.requests import AdapterDigests
from vllm_kvpool.vllm_adapt.weight_sources import OTHER_MODELS, WeightSources

SHAPE = LlamaShape(layers=1, vocab=64, hidden=32, intermediate=32)
WRAPPED = (
    "collective_rpc",
    "sleep",
    "set_weight_version",
    "_reset_caches",
    "reset_encoder_cache",
    "add_lora",
    "remove_lora",
)


class Broken(Exception):
    """Error of the fake engine."""


@dataclass
class Model:
    """vLLM's configuration of a model."""

    model: str
    revision: str | None = None
    hf_config: Any = None
    model_weights: str = ""


@dataclass
class Executor:
    sleeping_tags: set[str] = field(default_factory=set)


class Watcher:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def weights_changed(self, weights_version: str) -> None:
        self.heard.append(weights_version)

    def take(self) -> list[str]:
        heard, self.heard = self.heard, []
        return heard


class CacheWatcher:
    def __init__(self) -> None:
        self.num_resets = 0

    def encoder_cache_was_reset(self) -> None:
        self.num_resets += 1


class Core:
    """The part of vLLM's engine that is wrapped. Each test has a fresh copy of the class."""

    def __init__(self, path: Path, revision: str | None = None) -> None:
        self.vllm_config = types.SimpleNamespace(
            model_config=Model(str(path), revision),
            load_config=types.SimpleNamespace(download_dir=None),
            instance_id=str(time.time_ns()),
        )
        self.model_executor = Executor()
        self.calls: list[tuple[Any, ...]] = []
        self.during: Callable[[], object] = lambda: None
        self.watcher = Watcher()
        weights_version.watch(self.watcher, self.vllm_config)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Docstring that the wrapper keeps."""
        self.calls.append((method, timeout, args, kwargs))
        self.during()
        return ["done"]

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level, mode))
        self._reset_caches()
        self.during()
        self.model_executor.sleeping_tags = {"weights", "kv_cache"}

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(("version", weight_version))
        self.during()

    def _reset_caches(
        self, reset_running_requests: bool = True, reset_connector: bool = True
    ) -> None:
        self.calls.append(("reset", reset_running_requests, reset_connector))
        self.during()

    def reset_encoder_cache(self) -> None:
        self.calls.append(("reset encoder",))
        self.during()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.calls.append(("add_lora", lora_request))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.calls.append(("remove_lora", lora_id))
        return True


Make = Callable[..., Core]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("models")
    return [make_model(directory, replace(SHAPE, seed=seed)) for seed in range(3)]


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> type[Core]:
    """Install a copy of `Core` in the place of vLLM's engine, wrapped."""
    fake = type("EngineCore", (), dict(vars(Core)))
    module = types.SimpleNamespace(EngineCore=fake)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)  # type: ignore[arg-type]
    monkeypatch.setattr(weights_version, "_watchers", type(weights_version._watchers)())
    monkeypatch.setattr(weights_version, "_cache_watchers", type(weights_version._watchers)())
    monkeypatch.setattr(weights_version, "_adapters", {})
    monkeypatch.setattr(weights_version, "_slept", type(weights_version._slept)())
    monkeypatch.setattr(weights_version.models, "_seen", type(weights_version.models._seen)())
    weights_version.install()
    return fake


@pytest.fixture
def make(engine_class: type[Core], checkpoints: list[Path]) -> Make:
    return lambda path=checkpoints[0]: engine_class(path)


@pytest.fixture
def core(make: Make) -> Core:
    return make()


def fail() -> None:
    raise Broken


def is_drawn(heard: list[str]) -> bool:
    """Return True if exactly one change was heard, with a name that is unique."""
    return len(heard) == 1 and heard[0].startswith("drawn:")


def versions_at(path: str, revision: str) -> str:
    return weights_version.version_of_files(WeightSources(path, revision))


def version_of_files(path: str) -> str:
    return weights_version.version_of_files(WeightSources(path))


def reload(core: Core, **kwargs: Any) -> str:
    """Reload the weights and return the new epoch."""
    core.collective_rpc("reload_weights", kwargs=kwargs)
    [weights_version] = core.watcher.take()
    return weights_version


# Wrapping


def test_wrapping_twice_is_wrapping_once(core: Core, engine_class: type[Core]) -> None:
    before = {name: getattr(engine_class, name) for name in WRAPPED}
    weights_version.install()
    assert {name: getattr(engine_class, name) for name in WRAPPED} == before
    core.collective_rpc("anything")
    assert len(core.watcher.heard) == 1


def test_wrapped_methods_keep_their_signature(engine_class: type[Core]) -> None:
    for name in WRAPPED:
        wrapped, original = getattr(engine_class, name), getattr(Core, name)
        assert inspect.signature(wrapped) == inspect.signature(original)
        assert (wrapped.__name__, wrapped.__doc__) == (original.__name__, original.__doc__)


class Level(msgspec.Struct):
    value: int


def test_vllm_converts_arguments_by_the_signature() -> None:
    """vLLM converts arguments from the wire to the types of the method's annotations."""

    def sleep(self: object, level: Level) -> None: ...

    plain, wrapped = (type("Owner", (), {"sleep": sleep}) for _ in range(2))
    weights_version._wrap(wrapped, "sleep", weights_version._sleep)
    convert = EngineCoreProc._convert_msgspec_args
    assert convert(wrapped().sleep, [{"value": 2}]) == convert(plain().sleep, [{"value": 2}])
    assert list(convert(wrapped().sleep, [{"value": 2}])) == [Level(2)]


def test_methods_that_a_release_lacks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type("EngineCore", (), {"sleep": Core.sleep})
    module = types.SimpleNamespace(EngineCore=old)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)  # type: ignore[arg-type]
    weights_version.install()
    assert hasattr(old.__dict__["sleep"], weights_version.MARK)
    assert not set(WRAPPED) & (set(vars(old)) - {"sleep"})


def test_a_process_without_an_engine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core")
    weights_version.install()
    module = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)  # type: ignore[arg-type]
    weights_version.install()
    assert vars(module) == {}


LACKS: dict[str, set[str]] = {"0.23.0": {"set_weight_version"}, "0.27.1": set()}


def test_vllm_has_what_is_wrapped() -> None:
    lacks = {name for name in WRAPPED if not hasattr(VllmEngineCore, name)}
    assert lacks == since(LACKS, vllm.__version__)
    for name in set(WRAPPED) - lacks:
        theirs = inspect.signature(getattr(VllmEngineCore, name))
        ours = inspect.signature(getattr(Core, name))
        assert list(theirs.parameters) == list(ours.parameters)


def test_arguments_and_answers_pass(core: Core) -> None:
    assert core.collective_rpc("x", 1.5, (1,), {"a": 2}) == ["done"]
    assert core.collective_rpc(method="y", timeout=2.5, args=(3,), kwargs={"b": 4}) == ["done"]
    core.sleep(level=2, mode="keep")
    core.sleep(0)
    core.set_weight_version(weight_version="v1")
    core._reset_caches(reset_connector=False)
    resets = [("reset", True, True)] * 2
    assert core.calls == [
        ("x", 1.5, (1,), {"a": 2}),
        ("y", 2.5, (3,), {"b": 4}),
        ("sleep", 2, "keep"),
        resets[0],
        ("sleep", 0, "abort"),
        resets[1],
        ("version", "v1"),
        ("reset", True, False),
    ]


# Calls to all workers


@pytest.mark.parametrize("name", sorted(weights_version.HARMLESS))
def test_harmless_calls_change_nothing(core: Core, name: str) -> None:
    core.collective_rpc(name)
    core.collective_rpc(method=name, args=(1,))
    assert core.watcher.heard == []
    assert len(core.calls) == 2


class Callable_:
    """A callable without a name."""

    def __call__(self, worker: object) -> None: ...


@pytest.mark.parametrize(
    "method",
    [
        *("update_weights", "load_model", "finish_weight_update", "reset_weights", "apply_model"),
        *("", "Check_health", "check_health "),
        fail,
        lambda worker: None,
        functools.partial(fail),
        Callable_(),
    ],
    ids=lambda method: method if isinstance(method, str) else type(method).__name__,
)
def test_any_other_call_is_a_change(core: Core, method: Any) -> None:
    core.collective_rpc(method)
    first = core.watcher.take()
    core.collective_rpc(method=method)
    second = core.watcher.take()
    assert is_drawn(first)
    assert is_drawn(second)
    assert first != second


def test_a_function_called_like_a_harmless_one_is_a_change(core: Core) -> None:
    def check_health(worker: object) -> None: ...

    core.collective_rpc(check_health)
    assert is_drawn(core.watcher.heard)


@pytest.mark.parametrize("method", ["update_weights", "reload_weights", fail])
def test_a_call_that_fails_is_a_change(core: Core, method: Any) -> None:
    core.during = fail
    with pytest.raises(Broken):
        core.collective_rpc(method)
    assert is_drawn(core.watcher.heard)


def test_it_is_told_once_the_call_has_ended(core: Core) -> None:
    heard: list[list[str]] = []
    core.during = lambda: heard.append(list(core.watcher.heard))
    core.collective_rpc("update_weights")
    assert heard == [[]]


# Reloads


def test_a_reload_is_named_by_its_files(make: Make, checkpoints: list[Path]) -> None:
    one, two = make(), make()
    for path in checkpoints:
        weights_version = reload(one, weights_path=str(path))
        assert weights_version == reload(two, weights_path=str(path)) == version_of_files(str(path))
        assert weights_version.startswith("sample:")
    assert len({reload(one, weights_path=str(path)) for path in checkpoints}) == len(checkpoints)


def test_copies_of_files_are_the_same_weights(
    core: Core, checkpoints: list[Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(checkpoints[1], tmp_path / "copy")
    assert reload(core, weights_path=str(copy)) == version_of_files(str(checkpoints[1]))


def test_a_reload_without_a_path_reads_what_the_one_before_read(
    core: Core, checkpoints: list[Path]
) -> None:
    first, second = (version_of_files(str(path)) for path in checkpoints[:2])
    assert reload(core) == first
    assert reload(core, weights_path=str(checkpoints[1])) == second
    assert reload(core) == second
    assert reload(core, weights_path=None) == second


def test_a_path_given_by_position_is_remembered(core: Core, checkpoints: list[Path]) -> None:
    core.collective_rpc("reload_weights", args=(None, str(checkpoints[1])))
    assert core.watcher.take() == [version_of_files(str(checkpoints[1]))]
    assert reload(core) == version_of_files(str(checkpoints[1]))


def test_what_an_iterator_brings_has_no_name(core: Core, checkpoints: list[Path]) -> None:
    core.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(())})
    assert is_drawn(core.watcher.take())
    core.collective_rpc("reload_weights", args=(iter(()),))
    assert is_drawn(core.watcher.take())
    both = {"weights_iterator": iter(()), "weights_path": str(checkpoints[1])}
    core.collective_rpc("reload_weights", kwargs=both)
    assert is_drawn(core.watcher.take())
    assert reload(core) == version_of_files(str(checkpoints[0]))  # vLLM ignores the path then


@pytest.mark.parametrize("more", [{"is_checkpoint_format": False}, {"unheard_of": 1}])
def test_files_that_are_read_in_another_way_have_no_name(
    core: Core, checkpoints: list[Path], more: dict[str, Any]
) -> None:
    kwargs = {"weights_path": str(checkpoints[1]), **more}
    core.collective_rpc("reload_weights", kwargs=kwargs)
    assert is_drawn(core.watcher.heard)


@pytest.fixture
def cached(
    monkeypatch: pytest.MonkeyPatch, checkpoints: list[Path], tmp_path: Path
) -> Callable[..., None]:
    """Return a function that puts a revision into Hugging Face's cache or another folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def add(repository: str, revision: str, cache: Path = tmp_path) -> None:
        folder = cache / f"models--{repository.replace('/', '--')}"
        commit = revision.encode().hex().ljust(40, "0")
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
        shutil.copytree(checkpoints[len(revision) % 3], folder / "snapshots" / commit)

    return add


def test_weights_are_those_of_the_folder_that_vllm_downloads_to(
    engine_class: type[Core], cached: Callable[..., None], tmp_path: Path
) -> None:
    """Hugging Face's cache may have older weights, or only the configuration."""
    folder = tmp_path / "downloads"
    cached("org/model", "main")
    cached("org/model", "v1")
    versions = []
    for revision in ("main", "v1"):
        shutil.rmtree(folder, ignore_errors=True)
        cached("org/model", revision, folder)
        (folder / "models--org--model" / "refs" / revision).rename(
            folder / "models--org--model" / "refs" / "main"
        )
        core = engine_class(Path("org/model"))
        core.vllm_config.load_config.download_dir = str(folder)
        weights_version.watch(core.watcher, core.vllm_config)
        versions.append(reload(core))
    in_cache = [version_of_files("org/model"), versions_at("org/model", "v1")]
    assert versions == in_cache
    assert versions[0] != versions[1]


def test_a_reload_by_the_name_of_a_repository_has_no_name(
    engine_class: type[Core], cached: Callable[..., None], checkpoints: list[Path]
) -> None:
    """Releases differ in the revision that they read, and in the folder for object storage."""
    cached("org/other", "main")
    local, own = str(checkpoints[1]), checkpoints[0]
    core = engine_class(own)
    assert reload(core, weights_path="org/other").startswith("drawn:")
    assert reload(core).startswith("drawn:")
    assert reload(core, weights_path=local) == version_of_files(local)
    core.vllm_config.model_config.model_weights = "s3://bucket/model"
    assert reload(core, weights_path=local).startswith("drawn:")


def test_a_reload_that_fails_leaves_the_path_unknown(core: Core, checkpoints: list[Path]) -> None:
    """Workers may read from the new path next time, or from the old path."""
    core.during = fail
    with pytest.raises(Broken):
        core.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints[1])})
    assert is_drawn(core.watcher.take())
    core.during = lambda: None
    core.collective_rpc("reload_weights")
    assert is_drawn(core.watcher.take())
    assert reload(core, weights_path=str(checkpoints[0])).startswith("sample:")
    assert reload(core).startswith("sample:")


def test_a_function_may_have_changed_the_path(core: Core) -> None:
    core.collective_rpc(lambda worker: worker.reload_weights(weights_path="elsewhere"))
    core.watcher.take()
    core.collective_rpc("reload_weights")
    assert is_drawn(core.watcher.heard)


@pytest.mark.parametrize("path", ["no/such-model-anywhere", "", "s3://bucket/model", "\0"])
def test_files_that_are_not_at_hand_have_no_name(core: Core, path: str) -> None:
    core.collective_rpc("reload_weights", kwargs={"weights_path": path})
    assert is_drawn(core.watcher.take())
    core.collective_rpc("reload_weights", kwargs={"weights_path": path})
    assert is_drawn(core.watcher.heard)


def test_a_directory_without_weights_has_no_name(core: Core, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
    assert is_drawn(core.watcher.heard)


def test_files_written_while_they_are_read_have_no_name(
    core: Core, checkpoints: list[Path], tmp_path: Path
) -> None:
    path = shutil.copytree(checkpoints[1], tmp_path / "training")

    def next_checkpoint() -> None:
        shutil.copytree(checkpoints[2], path, dirs_exist_ok=True)

    core.during = next_checkpoint
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    assert is_drawn(core.watcher.take())
    assert reload(core) == version_of_files(str(checkpoints[2]))


def rewritten(
    source: Path, target: Path, change: Callable[[dict[str, Any]], object], suffix: str = ""
) -> Path:
    """Return a copy of a checkpoint with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    (target / "model.safetensors").unlink()
    save_file(tensors, target / f"model{suffix or '.safetensors'}", metadata={"format": "pt"})
    return target


def test_a_checkpoint_of_some_weights_has_no_name(
    core: Core, checkpoints: list[Path], tmp_path: Path
) -> None:
    """The other weights stay, and they depend on earlier loads."""
    some = rewritten(checkpoints[1], tmp_path / "some", lambda t: t.pop("lm_head.weight"))
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(some)})
    assert is_drawn(core.watcher.take())
    more = rewritten(
        checkpoints[1], tmp_path / "more", lambda t: t.update(more=t["model.norm.weight"])
    )
    assert reload(core, weights_path=str(more)) == version_of_files(str(more))


def test_files_of_another_kind_have_a_name_only_if_they_are_the_first(
    make: Make, checkpoints: list[Path], tmp_path: Path
) -> None:
    """The tensors in such files are not looked up."""
    one, two = (
        rewritten(checkpoints[i], tmp_path / str(i), lambda t: None, suffix=".bin") for i in (0, 1)
    )
    core = make(one)
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(two)})
    assert is_drawn(core.watcher.take())
    assert reload(core, weights_path=str(one)) == version_of_files(str(one))


@pytest.mark.parametrize("part", [*OTHER_MODELS, *FOLDERS_OF_WEIGHTS])
@pytest.mark.parametrize("moves", [False, True])
def test_a_reload_reads_the_parts_outside_the_directory_anew(
    engine_class: type[Core], checkpoints: list[Path], tmp_path: Path, part: str, moves: bool
) -> None:
    """The parts are other models, and folders of the first directory. The model may have moved."""
    own = shutil.copytree(checkpoints[0], tmp_path / "own")
    other = own / part
    shutil.copytree(checkpoints[2], other)
    core = engine_class(own)
    if part in OTHER_MODELS:
        core.vllm_config.model_config.hf_config = types.SimpleNamespace(**{part: str(other)})
    weights_version.watch(core.watcher, core.vllm_config)
    where = {"weights_path": str(shutil.copytree(own, tmp_path / "moved"))} if moves else {}
    first = reload(core, **where)
    assert first == reload(core) == reload(core, **where)
    assert first.startswith("sample:")
    rewritten(checkpoints[2], tmp_path / "new", lambda t: t["model.norm.weight"].fill(2))
    shutil.copytree(tmp_path / "new", other, dirs_exist_ok=True)
    second = reload(core)
    assert second.startswith("sample:")
    assert second != first


# Sleep, versions, pauses


@pytest.mark.parametrize(("level", "is_change"), [(0, False), (1, False), (2, True), (3, True)])
def test_only_a_deep_sleep_is_a_change(core: Core, level: int, is_change: bool) -> None:
    core.sleep(level)
    assert is_drawn(core.watcher.take()) == is_change
    core.sleep(level=level)
    assert is_drawn(core.watcher.take()) == is_change


def test_a_sleep_that_fails_is_a_change(core: Core) -> None:
    core.during = fail
    with pytest.raises(Broken):
        core.sleep(2)
    assert is_drawn(core.watcher.heard)
    assert not weights_version.is_pausing()
    assert not weights_version._weights_sleep()


def test_weights_sleep_until_they_are_woken(core: Core, make: Make) -> None:
    other = make()
    assert not weights_version._weights_sleep()
    core.sleep(1)
    other.sleep(1)
    assert weights_version._weights_sleep()
    core.model_executor.sleeping_tags = {"kv_cache"}
    assert weights_version._weights_sleep()
    other.model_executor.sleeping_tags = {"kv_cache"}
    assert not weights_version._weights_sleep()


def test_an_engine_that_is_gone_does_not_sleep(make: Make) -> None:
    core = make()
    core.sleep(1)
    del core
    gc.collect()
    assert not weights_version._weights_sleep()


@pytest.mark.parametrize("fails", [False, True])
def test_a_version_is_a_change(core: Core, fails: bool) -> None:
    if fails:
        core.during = fail
        with pytest.raises(Broken):
            core.set_weight_version("v2")
    else:
        core.set_weight_version("v2")
    assert is_drawn(core.watcher.heard)


def test_pauses_nest_and_end_when_they_fail(core: Core) -> None:
    seen: list[bool] = []

    def inner() -> None:
        seen.append(weights_version.is_pausing())
        core.during = fail
        with pytest.raises(Broken):
            core._reset_caches()
        seen.append(weights_version.is_pausing())

    assert not weights_version.is_pausing()
    core.during = inner
    core._reset_caches()
    assert seen == [True, True]
    assert not weights_version.is_pausing()
    assert core.watcher.heard == []


class Scheduler:
    """A scheduler that counts resets."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> bool:
        self.resets += 1
        return False


class FakeSide(KVPoolConnector):
    """The connector of a scheduler's process, without what it stands on."""

    def __init__(self) -> None:
        self.resets = Scheduler()
        self._events = None

    @property
    def _scheduler(self) -> Any:
        return self.resets


def test_a_pause_leaves_the_pool_alone_and_a_user_does_not(core: Core) -> None:
    connector = FakeSide()
    answers: list[bool | None] = []
    core.during = lambda: answers.append(connector.reset_cache())
    core._reset_caches()
    core.during = lambda: None
    assert (answers, connector.resets.resets) == ([True], 0)
    assert connector.reset_cache() is False
    assert connector.resets.resets == 1


# Who is told


def test_watchers_are_not_kept_alive(core: Core) -> None:
    core.watcher = Watcher()
    gc.collect()
    core.collective_rpc("update_weights")
    assert list(weights_version._watchers) == []


def test_only_the_engine_that_changed_is_told(make: Make, checkpoints: list[Path]) -> None:
    """Another engine of the same process keeps its weights and must not get the new name."""
    one, two = make(), make()
    reload(one, weights_path=str(checkpoints[1]))
    one.sleep(2)
    one.set_weight_version("v2")
    one.collective_rpc("update_weights")
    assert two.watcher.heard == []
    assert len(one.watcher.heard) == 3


def test_a_change_of_nobody_knows_whom_has_a_name_for_each(make: Make) -> None:
    cores = [make() for _ in range(3)]
    weights_version.notify("load_weights")
    heard = [core.watcher.take() for core in cores]
    assert all(is_drawn(each) for each in heard)
    assert len({weights_version for [weights_version] in heard}) == 3


def test_an_encoder_cache_is_that_of_one_engine(make: Make) -> None:
    one, two = make(), make()
    first, second = CacheWatcher(), CacheWatcher()
    for core, watcher in ((one, first), (two, second)):
        weights_version.watch_encoder_cache(watcher, core.vllm_config.model_config)
    one.reset_encoder_cache()
    assert (first.num_resets, second.num_resets) == (1, 0)
    one.during = fail
    with pytest.raises(Broken):
        one.reset_encoder_cache()
    assert one.calls == [("reset encoder",)] * 2
    make().reset_encoder_cache()  # a copied configuration may hide whose it is
    assert second.num_resets == 1


def test_a_change_of_an_engine_that_nobody_watches_is_everybodys(
    make: Make, checkpoints: list[Path]
) -> None:
    """A copied configuration may hide its engine. No name is believed then."""
    core, other = make(), make()
    core.vllm_config.model_config = replace(core.vllm_config.model_config)
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints[1])})
    assert is_drawn(core.watcher.heard)
    assert is_drawn(other.watcher.heard)


@pytest.fixture(autouse=True)
def _pauses_end() -> Iterator[None]:
    yield
    assert not weights_version.is_pausing()


# Adapters


def test_an_adapter_that_changes_between_its_load_and_its_first_request_has_no_digest(
    core: Core, tmp_path: Path
) -> None:
    """A server loads an adapter with its first mention. The engine has the content of that time."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    path, digests = str(tmp_path), AdapterDigests()
    assert core.add_lora(LoRARequest("a", 1, path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"another")
    core.add_lora(LoRARequest("a", 1, path))  # vLLM keeps what it has
    with pytest.raises(OSError, match="have changed since"):
        digests.of(1, path, False)
    core.add_lora(LoRARequest("a", 1, path, load_inplace=True))
    loaded = digests.of(1, path, False)
    core.remove_lora(1)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"the third")
    core.add_lora(LoRARequest("a", 1, path))
    assert AdapterDigests().of(1, path, False) != loaded
    assert [call[0] for call in core.calls] == [*["add_lora"] * 3, "remove_lora", "add_lora"]


class AdapterWatcher:
    def __init__(self, config: object) -> None:
        self.told: list[tuple[object, ...]] = []
        weights_version.watch_adapters(self, config)

    def adapter_loaded(self, adapter_id: int, path: str, *, in_place: bool) -> None:
        self.told.append((adapter_id, path, in_place))

    def adapter_removed(self, adapter_id: int) -> None:
        self.told.append((adapter_id,))


def test_an_engine_is_told_of_its_own_adapters(core: Core) -> None:
    its, another = AdapterWatcher(core.vllm_config.model_config), AdapterWatcher(object())
    core.add_lora(LoRARequest("a", 1, "/nowhere"))
    core.add_lora(LoRARequest("a", 1, "/nowhere", load_inplace=True))
    core.remove_lora(1)
    assert its.told == [(1, "/nowhere", False), (1, "/nowhere", True), (1,)]
    assert another.told == []


@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_to_all_workers_may_load_one_in_place(core: Core, by_name: bool) -> None:
    watcher = AdapterWatcher(core.vllm_config.model_config)
    for inplace in (False, True):
        lora = LoRARequest("a", 1, "/nowhere", load_inplace=inplace)
        given = {"kwargs": {"lora_request": lora}} if by_name else {"args": (lora,)}
        assert core.collective_rpc("add_lora", **given) == ["done"]
        assert watcher.told[-1] == (1, "/nowhere", inplace)
    assert [call[0] for call in core.calls] == ["add_lora"] * 2


def test_an_adapter_whose_files_are_not_here_is_loaded_all_the_same(core: Core) -> None:
    assert core.add_lora(LoRARequest("a", 7, "/nowhere"))
    assert weights_version.adapter_as_loaded(7, "/nowhere") is None
