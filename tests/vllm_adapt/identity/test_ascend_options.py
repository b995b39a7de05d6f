"""Every option of vLLM-Ascend counts, or is left out by name and with a reason."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.ascend_options import (
    OPTIONS,
    VARIABLES,
    VARIABLES_OF_NO_OPTION,
    paths,
    written_by_platform,
    written_for_producers,
)
from tests.support.models import LlamaShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.identity import ascend_options
from vllm_kvpool.vllm_adapt.identity.factors import ENVIRONMENT_LEFT_OUT, environment_factors
from vllm_kvpool.vllm_adapt.identity.namespace import engine_namespace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

RELEASES = sorted(OPTIONS)
UNSEEN = "a value that no release has"

# Options of the two roles in vLLM-Ascend's guide of disaggregated prefill.
PREFILL = {"enable_shared_expert_dp": True}
DECODE = {
    "recompute_scheduler_enable": True,
    "multistream_overlap_shared_expert": True,
    "finegrained_tp_config": {"lmhead_tensor_parallel_size": 16},
}
DECODE_IN_SECTION = {"scheduler_config": {"recompute_scheduler_enable": True}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    model = make_model(tmp_path_factory.mktemp("models"), LlamaShape())
    return EngineArgs(
        model=str(model), dtype="float32", skip_tokenizer_init=True, block_size=32
    ).create_engine_config()


def namespace(config: VllmConfig, additional: Any) -> str:
    before = config.additional_config
    config.additional_config = additional
    try:
        return str(engine_namespace(config, read_config({}, env={}), [], []).namespace)
    finally:
        config.additional_config = before


def at(path: str, value: Any) -> dict[str, Any]:
    """Return an option at its place."""
    section, _, name = path.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@pytest.mark.parametrize("release", RELEASES)
def test_every_option_counts_or_is_left_out_with_a_reason(config: VllmConfig, release: str) -> None:
    plain = namespace(config, {})
    for path in paths(release):
        counts = namespace(config, at(path, UNSEEN)) != plain
        assert counts is not (path in ascend_options.LEFT_OUT), path
        assert counts or len(ascend_options.LEFT_OUT[path]) > 5, path


def test_the_tables_name_only_options_of_tested_releases() -> None:
    known = {path for release in RELEASES for path in paths(release)}
    assert ascend_options.NEUTRAL.keys() | ascend_options.LEFT_OUT.keys() <= known
    assert ascend_options.NEUTRAL.keys().isdisjoint(ascend_options.LEFT_OUT)


@pytest.mark.parametrize(
    "additional",
    [
        {"later": True},
        {"ascend_compilation_config": {"later": True}},
        {"ascend_fusion_config": {"later": True}},
        {"ascend_compilation_config": True},
    ],
)
def test_an_option_that_nobody_knows_counts(config: VllmConfig, additional: Any) -> None:
    assert namespace(config, additional) != namespace(config, {})


def test_defaults_that_are_written_out_count_as_not_set(config: VllmConfig) -> None:
    for path, value in ascend_options.NEUTRAL.items():
        assert namespace(config, at(path, value)) == namespace(config, {}), path
    assert namespace(config, None) == namespace(config, {})


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("decode", [DECODE, DECODE_IN_SECTION], ids=["flat", "in a section"])
def test_prefill_decode_and_a_cpu_share_under_the_options_of_the_guide(
    config: VllmConfig, release: str, decode: dict[str, Any]
) -> None:
    """The producer is eager and the consumer has graphs. `NPUPlatform` writes both options."""
    producer = PREFILL | written_by_platform(release, graphs=False)
    producer |= written_for_producers(release)
    consumer = decode | written_by_platform(release, graphs=True)
    assert namespace(config, producer) == namespace(config, consumer) == namespace(config, {})


@pytest.mark.parametrize("release", RELEASES)
def test_variables_count_as_their_options(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    known = {name: lambda: "1" for name in VARIABLES[release]}
    for name in known:
        monkeypatch.setenv(name, "1")
        is_left_out = ascend_options.VARIABLES[name] in ascend_options.LEFT_OUT
        assert (name not in environment_factors(known)) is is_left_out, name
        monkeypatch.delenv(name)


@pytest.mark.parametrize("release", RELEASES)
def test_variables_of_no_option_are_left_out_and_unknown_ones_count(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    later = "VLLM_ASCEND_LATER"
    known = dict.fromkeys((*VARIABLES_OF_NO_OPTION[release], later), lambda: "1")
    for name in known:
        monkeypatch.setenv(name, "1")
    assert environment_factors(known).keys() == {later}


def test_the_variables_are_those_of_tested_releases() -> None:
    assert ascend_options.VARIABLES.keys() == set().union(*VARIABLES.values())
    options = set().union(*OPTIONS.values())
    assert set(ascend_options.VARIABLES.values()) <= options
    of_none = set().union(*VARIABLES_OF_NO_OPTION.values())
    assert of_none == ascend_options.VARIABLES_LEFT_OUT.keys() - ascend_options.VARIABLES.keys()
    for name, reason in ascend_options.VARIABLES_LEFT_OUT.items():
        assert any(fnmatchcase(name, pattern) for pattern in ENVIRONMENT_LEFT_OUT)
        assert len(reason) > 5, name


@pytest.mark.parametrize("quantised", [False, True])
def test_npus_share_with_hosts_what_is_not_quantised(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    """NPUs follow the rule of CPUs and GPUs: the device counts if weights or KV are quantised."""
    monkeypatch.setattr(config.model_config, "quantization", "fp8" if quantised else None)
    names = set()
    for device in ("cpu", "cuda", "npu"):
        monkeypatch.setattr(compat, "device_type", lambda each=device: each)
        monkeypatch.setattr(compat, "quantising_device", lambda each=device: each)
        names.add(namespace(config, {}))
    assert len(names) == (3 if quantised else 1)
