"""Parameters that are written into: every way of writing is seen, and no other change is."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_kvpool.vllm_adapt.identity.weights_version import Models

MOST_SECONDS = 0.05  # of a look at 500 parameters; best of a few, the machine may be busy
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.float64,
)


class Small(torch.nn.Module):
    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        for number, data in enumerate(parameters):
            parameter = torch.nn.Parameter(data, requires_grad=False)
            self.register_parameter(f"p{number}", parameter)

    def load_weights(self, weights: Any) -> set[str]:
        """Load weights as vLLM does: by name, in place."""
        mine = dict(self.named_parameters())
        names = set()
        for name, data in weights:
            mine[name].data.copy_(data)
            names.add(name)
        return names


class Runner:
    """A model runner that registers pages: it knows the model, and its frame is on the stack."""

    def __init__(self, model: object) -> None:
        self.model = model

    def get_model(self) -> object:
        return self.model

    def register(self, models: Models) -> None:
        Connector().register_kv_caches(models)


class Connector:
    def register_kv_caches(self, models: Models) -> None:
        models.watch_callers()


@dataclass
class Watched:
    """The engine's side of `models`: counts reported loads, and says whether it sleeps."""

    loads: int = 0
    asleep: bool = False
    models: Models = field(init=False)

    def __post_init__(self) -> None:
        self.models = Models(self.loaded, lambda: self.asleep)

    def loaded(self) -> None:
        self.loads += 1

    def add(self, model: object) -> None:
        Runner(model).register(self.models)

    def changed(self) -> bool:
        return self.models.have_changed()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def linear() -> Small:
    torch.manual_seed(0)
    return Small(torch.randn(64, 48), torch.randn(64), torch.randn(3, 5, 7))


Write = Callable[[Small], object]
WRITES: dict[str, Write] = {
    "in place": lambda m: m.p0.add_(1.0),
    "copy into data": lambda m: m.p0.data.copy_(torch.ones(64, 48)),
    "fill": lambda m: m.p1.fill_(0.5),
    "slice": lambda m: m.p0.data[:32].mul_(2.0),
    "column": lambda m: m.p0.data[:, ::2].mul_(-1.0),
    "detached": lambda m: m.p2.detach().zero_(),
    "data replaced": lambda m: setattr(m.p0, "data", torch.ones(64, 48)),
    "parameter replaced": lambda m: setattr(m, "p1", torch.nn.Parameter(torch.ones(64))),
    "parameter added": lambda m: m.register_parameter("p9", torch.nn.Parameter(torch.ones(1))),
    "parameter removed": lambda m: delattr(m, "p2"),
    "other form": lambda m: setattr(m.p0, "data", m.p0.data.t().contiguous()),
    "state": lambda m: m.load_state_dict({n: v + 1 for n, v in m.state_dict().items()}),
    "as numbers": lambda m: m.p1.data.numpy().__setitem__(slice(None), 3.0),
    "inference": lambda m: torch.inference_mode()(lambda: m.p0.mul_(3.0))(),
    "half": lambda m: m.half(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_write_is_seen_once(watched: Watched, write: Write) -> None:
    model = linear()
    watched.add(model)
    assert not watched.changed()
    with torch.no_grad():
        write(model)
    assert watched.changed()
    assert not watched.changed()
    assert watched.loads == 0


READS: dict[str, Write] = {
    "nothing": lambda m: None,
    "reading": lambda m: [p.sum() for p in m.parameters()],
    "a copy": lambda m: m.p0.clone().zero_(),
    "the same values": lambda m: m.p0.data.copy_(m.p0.data.clone()),
    "moved": lambda m: setattr(m.p0, "data", m.p0.data.clone()),
    "gradients wanted": lambda m: m.requires_grad_(True),
    "a buffer": lambda m: m.register_buffer("b", torch.ones(3)),
    "evaluation": lambda m: m.eval(),
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_what_is_no_write_is_not_seen(watched: Watched, read: Write) -> None:
    model = linear()
    watched.add(model)
    with torch.no_grad():
        read(model)
    assert not watched.changed()


def test_a_look_takes_what_is_there_as_known(watched: Watched) -> None:
    model = linear()
    watched.add(model)
    model.p0.data.zero_()
    watched.models.resample()
    assert not watched.changed()


# Forms of parameters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1,), (7,), (128, 96)], ids=str)
def test_every_type_is_looked_at(
    watched: Watched, dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    model = Small(torch.zeros(size).to(dtype))
    watched.add(model)
    assert not watched.changed()
    model.p0.data.copy_(torch.ones(size).to(dtype))
    assert watched.changed()


def test_small_updates_of_half_floats_are_seen(watched: Watched) -> None:
    """A training step changes only the low bytes, which are every second byte."""
    model = Small(torch.ones(256, 256, dtype=torch.bfloat16))
    watched.add(model)
    model.p0.data.mul_(1.0 + 1 / 64)
    assert watched.changed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_updates_of_floats_are_seen(watched: Watched, dtype: torch.dtype) -> None:
    model = Small(torch.ones(1 << 20, dtype=dtype))
    watched.add(model)
    model.p0.data.mul_(1.0 + 4 * torch.finfo(dtype).eps)
    assert watched.changed()


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.zeros(300, 70).t(),
    "every second": lambda: torch.zeros(300, 70)[::2, ::3],
    "a part": lambda: torch.zeros(1 << 20)[5000:5040],
    "a part of a matrix": lambda: torch.zeros(1000, 1000)[3:7, 990:],
    "the end": lambda: torch.zeros(1 << 20)[-3:],
    "expanded": lambda: torch.zeros(1, 64).expand(4096, 64),
    "a scalar": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_write_into_any_form_is_seen(watched: Watched, form: Callable[[], torch.Tensor]) -> None:
    data = form()
    whole = torch.empty(0).set_(data.untyped_storage())
    model = Small(data)
    watched.add(model)
    assert not watched.changed()
    (whole if 0 in data.stride() else data).add_(1.0)  # torch refuses to write to itself
    assert watched.changed()


def test_parameters_that_share_a_storage_are_looked_at_one_by_one(watched: Watched) -> None:
    """Every parameter of a model may be a view of one flat tensor."""
    flat = torch.zeros(1 << 22)
    parts = flat.split(1 << 12)
    model = Small(*parts)
    watched.add(model)
    for number in (0, 1, 511, len(parts) - 1):
        parts[number].add_(1.0)
        assert watched.changed()
    assert not watched.changed()


def test_parameters_without_bytes_are_left_alone(watched: Watched) -> None:
    model = Small(torch.zeros(0), torch.zeros(3, 0, 2), torch.zeros(4))
    watched.add(model)
    assert not watched.changed()
    model.p2.data.add_(1.0)
    assert watched.changed()
    model.p2.data = torch.zeros(0)  # CPU engines drop what they have packed
    assert watched.changed()
    assert not watched.changed()


def test_parameters_on_no_device_are_left_alone(watched: Watched) -> None:
    model = Small(torch.zeros(8, device="meta"), torch.zeros(8))
    watched.add(model)
    assert not watched.changed()
    model.p1.data.add_(1.0)
    assert watched.changed()
    model.p0 = torch.nn.Parameter(torch.zeros(8))
    assert watched.changed()


def test_a_model_without_parameters_never_changes(watched: Watched) -> None:
    watched.add(Small())
    assert not watched.changed()


# load_weights


def test_loading_weights_is_told_at_once(watched: Watched) -> None:
    model = linear()
    watched.add(model)
    assert model.load_weights([("p1", torch.ones(64))]) == {"p1"}
    assert watched.loads == 1
    assert model.load_weights(weights=[]) == set()
    assert watched.loads == 2


def test_loading_that_fails_is_told_too(watched: Watched) -> None:
    model = linear()
    watched.add(model)
    with pytest.raises(KeyError):
        model.load_weights([("p1", torch.ones(64)), ("no such", torch.ones(1))])
    assert watched.loads == 1


def test_a_model_is_wrapped_once_and_stays_what_it_is(watched: Watched) -> None:
    model = linear()
    before = (list(model.state_dict()), [name for name, _ in model.named_modules()])
    for _ in range(3):
        watched.add(model)
    model.load_weights([])
    assert watched.loads == 1
    assert model.load_weights.__doc__ == Small.load_weights.__doc__
    assert (list(model.state_dict()), [name for name, _ in model.named_modules()]) == before


def test_a_model_without_load_weights_is_looked_at(watched: Watched) -> None:
    model = torch.nn.Linear(8, 8)
    watched.add(model)
    model.weight.data.zero_()
    assert watched.changed()


# Several models, sleep, the stack


def test_any_of_several_models_is_seen(watched: Watched) -> None:
    models = [linear() for _ in range(3)]
    for model in models:
        watched.add(model)
    assert not watched.changed()
    for model in models:
        model.p0.data.add_(1.0)
        assert watched.changed()
        assert not watched.changed()


def test_a_model_that_comes_later_is_no_change(watched: Watched) -> None:
    watched.add(linear())
    keep = Small(torch.ones(4))
    watched.add(keep)
    assert not watched.changed()


def test_models_are_not_kept_alive(watched: Watched) -> None:
    watched.add(linear())
    gc.collect()
    assert len(watched.models._seen) == 0
    assert not watched.changed()


class Untouchable(Small):
    """A model whose memory can be away: looking at it then is an error."""

    is_away = False

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        assert not self.is_away
        return super().parameters(recurse)


def test_nothing_is_touched_while_it_is_asleep(watched: Watched) -> None:
    model = Untouchable(torch.zeros(100))
    watched.add(model)
    watched.asleep = model.is_away = True
    watched.models.resample()
    assert not watched.changed()
    model.p0.data.add_(1.0)
    watched.asleep = model.is_away = False
    assert watched.changed()


def test_the_stack_may_hold_anything(watched: Watched) -> None:
    """Frames without a model, or with another kind of `get_model`, are skipped."""
    model = linear()
    outer = Runner(model)

    class Strange:
        get_model = None

        def call(self) -> None:
            Runner("no module").register(watched.models)

    class Outer(Runner):
        def call(self) -> None:
            Strange().call()

    Outer(model).call()
    model.p0.data.add_(1.0)
    assert watched.changed()
    del outer


def test_without_a_model_on_the_stack_nothing_is_watched(watched: Watched) -> None:
    Connector().register_kv_caches(watched.models)
    assert len(watched.models._seen) == 0
    assert not watched.changed()


@pytest.mark.alone
def test_a_look_is_cheap(watched: Watched) -> None:
    shared = torch.zeros(1 << 20)
    model = Small(*(torch.empty_strided((1024, 1024), (1024, 1)) for _ in range(50)))
    for number in range(50, 500):
        model.register_parameter(f"p{number}", torch.nn.Parameter(shared))
    watched.add(model)
    assert sum(1 for _ in model.parameters()) == 500
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        watched.models.resample()
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < MOST_SECONDS
