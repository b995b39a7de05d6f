"""vLLM's own Request objects as the pool sees them: the parts that keep requests apart."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from tests.test_config import NOT_READ
from vllm_kvpool.config import RequestOptions
from vllm_kvpool.identity.chunk_hash import ChunkChain, tenant_of
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.request import OwnKV
from vllm_kvpool.vllm_adapt import compat, requests
from vllm_kvpool.vllm_adapt.compat import Defect
from vllm_kvpool.vllm_adapt.requests import (
    LORA_LEFT_OUT,
    AdapterDigests,
    RequestReader,
    VllmRequest,
)

CHUNK = 16
IDS = list(range(100, 148))


def image(identifier: str, offset: int = 4, length: int = 8) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=place
    )


def request(params: object = None, **arguments: Any) -> Request:
    extra = {"kv_transfer_params": params} if params is not None else None
    values: dict[str, Any] = {"prompt_token_ids": IDS, "pooling_params": None} | arguments
    return Request(
        request_id="r", sampling_params=SamplingParams(max_tokens=4, extra_args=extra), **values
    )


def view(
    *, named: bool = True, params: dict[str, Any] | None = None, **arguments: Any
) -> VllmRequest:
    return read(request(params, **arguments), named=named)


def read(
    asked: Request, *, named: bool = True, registry: MetricsRegistry | None = None
) -> VllmRequest:
    return RequestReader(registry or MetricsRegistry(), media_are_named=named).read(asked)


def hashes(seen: VllmRequest) -> list[bytes]:
    identity = seen.identity()
    assert identity is not None
    chain = ChunkChain(CHUNK, identity)
    chain.extend(seen.tokens())
    return chain.hashes


def adapter(directory: Path, content: bytes) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(content)
    return str(directory)


@pytest.mark.parametrize("embeds", [None, torch.zeros(len(IDS), 4)])
def test_the_tokens_are_the_prompt_and_what_has_come_since(embeds: torch.Tensor | None) -> None:
    live = request(prompt_embeds=embeds)
    seen = read(live)
    assert list(seen.tokens()) == list(live.all_token_ids)
    assert (seen.tokens() is live.prompt_token_ids) == (embeds is None)
    live.append_output_token_ids([7, 8])
    assert list(seen.tokens()) == list(live.all_token_ids)
    assert list(seen.tokens())[-2:] == [7, 8]


def test_everything_that_shapes_kv_keeps_requests_apart(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", b"1" * 64)
    two = adapter(tmp_path / "two", b"2" * 64)
    embeds = torch.randn(len(IDS), 4)
    only_embeds = {"prompt_token_ids": None}
    seen = [
        view(),
        view(cache_salt="a"),
        view(cache_salt="b"),
        view(lora_request=LoRARequest("x", 1, one)),
        view(lora_request=LoRARequest("x", 2, two)),
        view(mm_features=[image("cat")]),
        view(mm_features=[image("dog")]),
        view(mm_features=[image("cat", offset=5)]),
        view(mm_features=[image("cat", length=9)]),
        view(prompt_embeds=embeds, **only_embeds),
        view(prompt_embeds=embeds + 1, **only_embeds),
        view(prompt_embeds=embeds.bfloat16(), **only_embeds),
    ]
    first = [hashes(v)[0] for v in seen]
    assert len(set(first)) == len(first)


def test_chunks_have_the_same_names_in_every_release(tmp_path: Path) -> None:
    """Releases differ in their own handling of adapters, salts and embeddings."""
    seen = view(
        lora_request=LoRARequest("x", 1, adapter(tmp_path / "one", b"1" * 64)),
        cache_salt="a",
        prompt_embeds=torch.arange(len(IDS) * 4, dtype=torch.float32).view(-1, 4),
        prompt_is_token_ids=[i < 24 for i in range(len(IDS))],
    )
    assert hashes(seen)[-1].hex() == "3e50dd4416c21c6d4b0ccd605d18e9e7044ef723"


def test_chunks_from_an_image_on_have_names_of_their_own_in_every_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client has given the identifier of the image, so all releases have the same."""
    seen = []
    for release in ("0.23.0", "0.32.0"):
        monkeypatch.setattr(vllm, "__version__", release)
        seen.append(hashes(view(mm_features=[image("cat", offset=CHUNK)])))
    assert [one == other for one, other in zip(*seen, strict=True)] == [True, False, False]


SHAPE_KV = {
    *(
        "_all_token_ids",
        "all_token_ids",
        "prompt_token_ids",
        "prompt_embeds",
        "prompt_is_token_ids",
    ),
    *("cache_salt", "lora_request", "mm_features", "resumable"),
}
SHAPE_NO_KV = {
    *("_block_hasher", "_output_token_ids", "_prompt_embeds_per_block_hashes", "abort_immediately"),
    *(
        "arrival_time",
        "async_tokens_to_discard",
        "block_hashes",
        "client_index",
        "drop_stale_output",
        "ec_transfer_params",
    ),
    *("events", "is_prefill_chunk", "kv_cache_report_mode", "kv_hints", "kv_transfer_params"),
    *("last_sched_seq", "max_tokens", "next_decode_eligible_step", "num_computed_tokens"),
    *("num_in_flight_tokens", "num_nans_in_logits", "num_output_placeholders", "num_preemptions"),
    *("num_prompt_tokens", "num_stale_output_tokens", "output_token_ids", "pooling_params"),
    *("prefill_stats", "priority", "replay_start", "request_id", "sampling_params", "session_id"),
    *("shared_prefix_boundary", "skip_reading_prefix_cache", "spec_decode_metrics"),
    *("spec_token_ids", "status", "stop_reason", "streaming_queue", "structured_output_request"),
    "trace_headers",
}


def test_everything_that_a_request_has_is_known_to_shape_kv_or_not() -> None:
    """A new part of a request in a later release must be classified."""
    assert vars(request()).keys() <= SHAPE_KV | SHAPE_NO_KV


@pytest.mark.parametrize(
    "name", [name for name in LoRARequest.__struct_fields__ if name not in LORA_LEFT_OUT]
)
def test_what_a_request_says_of_how_its_adapter_is_read_keeps_requests_apart(
    tmp_path: Path, name: str
) -> None:
    lora = LoRARequest("x", 1, adapter(tmp_path / "one", b"1" * 64))
    before = hashes(view(lora_request=lora))
    setattr(lora, name, {"tensorizer_uri": "s3://elsewhere"} if "dict" in name else True)
    assert hashes(view(lora_request=lora)) != before


def test_an_adapters_name_and_place_do_not_matter(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", b"1" * 64)
    copy = adapter(tmp_path / "copy", b"1" * 64)
    a = view(lora_request=LoRARequest("x", 1, one))
    b = view(lora_request=LoRARequest("y", 5, copy))
    assert hashes(a) == hashes(b)


def test_an_adapter_whose_files_change_has_no_digest_until_it_is_loaded_again(
    tmp_path: Path,
) -> None:
    """The engine keeps loaded weights, and reads the files again after it has dropped them.

    The pool cannot know which content the engine has.
    """
    path = adapter(tmp_path / "one", b"1" * 64)
    digests = AdapterDigests()
    before = digests.of(1, path, reload=False)
    assert digests.of(1, path, reload=False) == before
    adapter(tmp_path / "one", b"2" * 64)
    with pytest.raises(OSError, match="have changed since"):
        digests.of(1, path, reload=False)
    new = digests.of(2, path, reload=False)
    assert new != before
    assert digests.of(1, path, reload=True) == new
    assert digests.of(1, path, reload=False) == new


def test_an_adapter_with_an_id_that_another_has_has_no_digest(tmp_path: Path) -> None:
    """vLLM finds adapters by id: it computes with the adapter that it has loaded."""
    one, two = (adapter(tmp_path / name, name.encode() * 20) for name in ("one", "two"))
    digests = AdapterDigests()
    digests.loaded(1, one, in_place=False)
    digests.loaded(1, two, in_place=False)
    with pytest.raises(OSError, match=r"id 1 .* another id"):
        digests.of(1, two, reload=False)
    first = digests.of(1, one, reload=False)
    digests.loaded(1, two, in_place=True)  # vLLM has the other from now on
    assert digests.of(1, two, reload=False) != first
    with pytest.raises(OSError, match=r"id 1 .* another id"):
        digests.of(1, one, reload=False)
    digests.removed(1)
    digests.loaded(1, one, in_place=False)
    assert digests.of(1, one, reload=False) == first


@pytest.mark.parametrize("first", ["a request that is not shared", "a call"])
def test_what_an_engine_has_under_an_id_is_known_however_it_came(
    tmp_path: Path, first: str
) -> None:
    one, two = (adapter(tmp_path / name, name.encode() * 20) for name in ("one", "two"))
    reader = RequestReader(MetricsRegistry(), media_are_named=True)
    if first == "a call":
        reader.adapter_loaded(1, one, in_place=False)
    else:
        reader.read(request(lora_request=LoRARequest("a", 1, one), resumable=True))
    with pytest.raises(OSError, match=r"id 1 .* another id"):
        reader.read(request(lora_request=LoRARequest("b", 1, two))).identity()
    assert reader.read(request(lora_request=LoRARequest("a", 1, one))).identity()


# Entries of the engine's own caches under an adapter's name may be another adapter's


class Admitted:
    """Admits requests as vLLM does. Their identity has been read, except with `is_read=False`."""

    def __init__(self, **engine: Any) -> None:
        self.reader = RequestReader(MetricsRegistry(), media_are_named=True, **engine)

    def __call__(self, *, is_read: bool = True, inplace: bool = False, **said: Any) -> OwnKV:
        if "path" in said:
            number, name = said.pop("number", 1), said.pop("name", "a")
            said["lora_request"] = LoRARequest(name, number, said.pop("path"), load_inplace=inplace)
        seen = self.reader.read(request(**said))
        if is_read:
            seen.identity()
        return seen.admit()


OWN, OTHERS = OwnKV(), OwnKV(blocks=False)


def test_an_adapter_under_the_name_of_another_is_not_saved_behind_its_blocks(
    tmp_path: Path,
) -> None:
    """The other adapter's requests may opt out of sharing. vLLM has their blocks either way."""
    path = adapter(tmp_path / "a", b"one")
    for params in (None, {"kvpool": {"load": False, "save": False}}):
        admitted = Admitted()
        assert admitted(path=path) == admitted(path=path, number=2) == OWN
        path = adapter(tmp_path / "a", b"another")
        assert admitted(path=path, number=3, is_read=params is None, params=params) == OTHERS
        assert admitted(path=path, number=4) == OTHERS
        admitted.reader.own_cache_was_reset()
        assert admitted(path=path, number=4) == OWN
        assert Admitted(has_own_cache=False)(path=path) == OWN
        path = adapter(tmp_path / "a", b"one")


def test_blocks_of_an_adapter_that_is_not_read_yet_are_trusted_once_it_is(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"one")
    admitted = Admitted()
    assert admitted(path=path, is_read=False) == OTHERS
    assert admitted(path=path) == OWN


@pytest.mark.parametrize("how", ["a call", "requests"])
def test_an_adapter_loaded_in_place_is_not_saved_behind_own_blocks(
    tmp_path: Path, how: str
) -> None:
    """Running requests go on with the new content under the old name. Other names are unaffected.

    With requests that load in place, vLLM reads the files at every step.
    """
    path = adapter(tmp_path / "a", b"one")
    beside = adapter(tmp_path / "b", b"two")
    admitted = Admitted()
    assert admitted(path=path) == admitted(path=beside, number=2, name="b") == OWN
    if how == "a call":
        admitted.reader.adapter_loaded(1, path, in_place=True)
    else:
        assert admitted(path=path, inplace=True) == OTHERS
    assert admitted(path=path) == OTHERS
    assert admitted(path=beside, number=2, name="b") == OWN
    admitted.reader.own_cache_was_reset()
    assert admitted(path=path) == (OWN if how == "a call" else OTHERS)


def test_a_salt_is_not_taken_for_an_adapter_of_that_name(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"one")
    expected = OTHERS if compat._takes_salts_for_adapters() else OWN
    for first, second in (
        ({"path": path}, {"cache_salt": "a"}),
        ({"cache_salt": "a"}, {"path": path}),
    ):
        admitted = Admitted()
        assert admitted(**first) == OWN
        assert admitted(**second) == expected
        assert admitted(**first) == expected
        assert admitted(cache_salt="b") == admitted() == OWN
    assert Admitted(has_adapters=False)(cache_salt="a") == OWN


def test_hits_that_an_engine_mistakes_are_not_trusted() -> None:
    of_salts = Defect("x", lambda _: True, "", trusts_hits=lambda asked: not asked.cache_salt)
    admitted = Admitted(defects=[of_salts])
    assert admitted(cache_salt="a") == OTHERS
    assert admitted() == OWN
    after = Defect("x", lambda _: True, "", trusts_later_hits=lambda asked: not asked.resumable)
    admitted = Admitted(defects=[after])
    assert admitted() == OWN
    admitted(resumable=True)
    admitted.reader.own_cache_was_reset()  # the session goes on
    assert admitted() == OTHERS


def test_what_is_computed_while_an_adapter_is_read_at_every_step_is_not_saved(
    tmp_path: Path,
) -> None:
    """vLLM reads the files again in each step that has a request with `load_inplace`.

    The files may change while the request runs, or while other requests with the adapter run.
    """
    begun: list[None] = []
    reader = RequestReader(
        MetricsRegistry(), media_are_named=True, on_replaced=lambda: begun.append(None)
    )
    path = adapter(tmp_path / "a", b"one")

    def asked(number: int = 1, inplace: bool = False) -> tuple[bool, bool]:
        begun.clear()
        live = request(lora_request=LoRARequest("a", number, path, load_inplace=inplace))
        options = reader.read(live).options
        assert options.load
        return bool(begun), options.save

    assert asked() == (False, True)
    assert asked(inplace=True) == (True, False)
    assert asked(inplace=True) == (False, False)
    assert asked() == (False, False)
    assert asked(number=2) == (False, True)
    begun.clear()
    reader.read(request())
    assert not begun


def test_adapters_that_are_read_at_every_step_are_remembered_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_ADAPTERS", 1)
    begun: list[None] = []
    reader = RequestReader(
        MetricsRegistry(), media_are_named=True, on_replaced=lambda: begun.append(None)
    )
    path = adapter(tmp_path / "a", b"one")
    for number in (1, 2):
        reader.read(request(lora_request=LoRARequest("a", number, path, load_inplace=True)))
        assert len(begun) == number
    for number in (2, 3):  # it is not known any more which
        other = request(lora_request=LoRARequest("a", number, path))
        assert not reader.read(other).options.save


# Adapters that change the embeddings of media, which vLLM names by the adapter's name alone


def of_tower(
    reader: RequestReader, name: str, path: str, *, features: bool = True, number: int = 1
) -> list[bytes]:
    """Return the chunk names of a request with an adapter that also changes encoders."""
    media = [image(f"{name}:cat")] if features else []
    lora = LoRARequest(name, number, path)
    return hashes(reader.read(request(lora_request=lora, mm_features=media)))


@pytest.fixture
def tower() -> RequestReader:
    return RequestReader(MetricsRegistry(), media_are_named=True, adapts_encoders=True)


def test_the_name_of_an_adapter_of_encoders_does_not_count(
    tower: RequestReader, tmp_path: Path
) -> None:
    one, two = (adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    assert of_tower(tower, "a", one) == of_tower(tower, "b", one)
    assert of_tower(tower, "c", one) != of_tower(tower, "d", two, number=2)
    plain = RequestReader(MetricsRegistry(), media_are_named=True)
    assert of_tower(plain, "a", one) != of_tower(plain, "b", one)


def test_an_adapter_that_replaces_another_is_not_saved_with_its_embeddings(tmp_path: Path) -> None:
    one, two = (adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    admitted = Admitted(adapts_encoders=True)

    def seen(path: str, number: int, *features: MultiModalFeatureSpec) -> OwnKV:
        return admitted(path=path, number=number, mm_features=list(features))

    cat = image("a:cat")
    assert seen(one, 1, cat) == OWN
    for path, number in ((two, 2), (one, 1)):
        assert seen(path, number, cat) == OwnKV(blocks=False, embeddings=False)
        admitted.reader.own_cache_was_reset()  # which is not enough
        assert seen(path, number, cat) == OwnKV(blocks=False, embeddings=False)
    admitted.reader.own_cache_was_reset()
    assert seen(two, 2) == OWN
    admitted.reader.own_cache_was_reset()
    assert seen(one, 1, cat) == OwnKV(blocks=False, embeddings=False)
    admitted.reader.encoder_cache_was_reset()
    # Blocks in the engine's own prefix cache were computed from such embeddings.
    assert seen(one, 1, cat) == OTHERS
    admitted.reader.own_cache_was_reset()
    assert seen(one, 1, cat) == OWN


def test_media_that_are_numbered_are_known_behind_the_name_of_an_adapter(
    tower: RequestReader, tmp_path: Path
) -> None:
    lora = LoRARequest("a", 1, adapter(tmp_path / "a", b"one"))
    media = [image("a:renderer0-mm-3-image-0")]
    assert not tower.read(request(lora_request=lora, mm_features=media)).shareable


def test_hits_of_adapters_beyond_the_limit_are_not_trusted_and_of_known_ones_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requests, "MAX_OWN_NAMES", 2)
    admitted = Admitted(adapts_encoders=True)

    paths = [adapter(tmp_path / str(number), bytes([number])) for number in range(4)]

    def seen(number: int) -> OwnKV:
        path = paths[number]
        media = [image(f"{number}:cat")]
        return admitted(path=path, number=number, name=str(number), mm_features=media)

    for _ in range(2):
        assert seen(1) == seen(2) == OWN
        assert seen(3) == OwnKV(blocks=False, embeddings=False)
    admitted.reader.own_cache_was_reset()
    admitted.reader.encoder_cache_was_reset()
    assert seen(3) == OWN


def test_of_many_adapters_under_one_name_the_content_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requests, "MAX_KEYS_OF_NAME", 2)
    path = adapter(tmp_path / "a", b"one")
    admitted = Admitted()
    assert [admitted(path=path, number=number) for number in (1, 2, 3, 1)] == [
        OWN,
        OWN,
        OTHERS,
        OTHERS,
    ]


def test_of_more_adapters_than_are_remembered_the_oldest_is_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requests, "MAX_ADAPTERS", 2)
    digests = AdapterDigests()
    paths = [adapter(tmp_path / str(number), bytes([number]) * 64) for number in range(3)]
    for number, path in enumerate(paths):
        digests.of(number, path, reload=False)
    adapter(tmp_path / "1", b"new" * 20)
    with pytest.raises(OSError, match="have changed since"):  # it is remembered
        digests.of(1, paths[1], reload=False)
    adapter(tmp_path / "0", b"new" * 20)
    digests.of(0, paths[0], reload=False)


def test_an_adapter_whose_files_are_gone_is_what_it_was(tmp_path: Path) -> None:
    path = adapter(tmp_path / "one", b"1" * 64)
    digests = AdapterDigests()
    before = digests.of(1, path, reload=False)
    shutil.rmtree(path)
    assert digests.of(1, path, reload=False) == before
    adapter(tmp_path / "one", b"1" * 64)
    with pytest.raises(OSError, match="have changed since"):
        digests.of(1, path, reload=False)


def test_an_adapter_that_cannot_be_read_is_an_os_error() -> None:
    with pytest.raises(OSError, match="nowhere"):
        view(lora_request=LoRARequest("x", 1, "/nowhere")).identity()


def test_an_image_matters_from_where_it_begins() -> None:
    plain, seen = hashes(view()), hashes(view(mm_features=[image("cat", offset=20)]))
    assert seen[0] == plain[0]
    assert seen[1] != plain[1]
    assert seen[2] != plain[2]


def test_placeholder_ids_of_embeddings_do_not_matter() -> None:
    """Releases put different token ids in the places of embeddings."""
    embeds = torch.randn(len(IDS), 4)
    is_token = [i % 2 == 0 for i in range(len(IDS))]
    other = [t if tok else 7 for t, tok in zip(IDS, is_token, strict=True)]
    a = view(prompt_embeds=embeds, prompt_is_token_ids=is_token)
    b = view(prompt_token_ids=other, prompt_embeds=embeds, prompt_is_token_ids=is_token)
    assert hashes(a) == hashes(b)
    assert hashes(a) != hashes(view())


@pytest.mark.parametrize(
    ("arguments", "named", "shareable"),
    [
        ({}, True, True),
        ({}, False, True),
        ({"mm_features": [image("cat")]}, True, True),
        # Without any cache vLLM numbers media instead of naming them.
        ({"mm_features": [image("cat")]}, False, False),
        ({"mm_features": [image("renderer0-mm-3-image-0")]}, True, False),
        ({"resumable": True}, True, False),
    ],
)
def test_what_stays_out_of_the_pool(
    arguments: dict[str, Any], named: bool, shareable: bool
) -> None:
    assert view(named=named, **arguments).shareable is shareable


def test_prompt_logprobs_read_no_cache() -> None:
    asked = Request("r", IDS, SamplingParams(prompt_logprobs=1), None)
    assert not read(asked).reads_cache
    assert view().reads_cache


@pytest.mark.parametrize(
    ("base", "adapters"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_what_an_engine_computes_wrongly_is_not_saved(
    tmp_path: Path, base: bool, adapters: bool
) -> None:
    defect = Defect("x", lambda _: True, "", saves_base=base, saves_adapters=adapters)
    reader = RequestReader(MetricsRegistry(), media_are_named=True, defects=[defect])
    lora = LoRARequest("x", 1, adapter(tmp_path / "one", b"1" * 64))
    for options, save in (
        (reader.read(request()).options, base),
        (reader.read(request(lora_request=lora)).options, adapters),
    ):
        assert (options.save, options.load) == (save, True)


def test_media_that_an_engine_computes_wrongly_after_a_prefix_stay_out_of_the_pool() -> None:
    defect = Defect("x", lambda _: True, "", shares_media=False)
    reader = RequestReader(MetricsRegistry(), media_are_named=True, defects=[defect])
    assert not reader.read(request(mm_features=[image("cat")])).shareable
    assert reader.read(request()).shareable


def test_the_options_of_a_request() -> None:
    assert view().options == RequestOptions()
    wishes = {"kvpool": {"save": False, "expect_tokens": 512, "tokens": 3}}
    assert view(params=wishes).options == RequestOptions(save=False, expect_tokens=512)


@pytest.mark.parametrize(("ours", "message"), NOT_READ)
def test_a_request_whose_options_are_not_understood_is_not_saved(
    caplog: pytest.LogCaptureFixture, ours: object, message: str
) -> None:
    """The request goes on and may load. It is not saved because it may have asked for privacy."""
    registry = MetricsRegistry()
    options = read(request({"kvpool": ours}), registry=registry).options
    assert (options.save, options.load) == (False, True)
    assert registry.snapshot() == {"kvpool_failures{kind=request_options}": 1}
    [record] = caplog.records
    assert re.search(rf"request r: .*{message}.* not saved", record.getMessage())


@pytest.mark.parametrize("params", ["x", [1], 5, 0, ""])
def test_parameters_that_are_no_object_end_no_engine(params: object) -> None:
    """Clients may send them in `vllm_xargs`, which vLLM 0.27.1 passes on; its scheduler thread
    reads them here."""
    asked, registry = request(params), MetricsRegistry()
    options = read(asked, registry=registry).options
    assert (options.save, options.load) == (False, True)
    assert asked.kv_transfer_params is None
    assert registry.snapshot() == {"kvpool_failures{kind=request_options}": 1}


def test_a_tenant_is_named_by_the_request_or_by_a_digest_of_its_salt() -> None:
    assert view().tenant == ""
    assert view(cache_salt="a").tenant == tenant_of("a")
    assert view(cache_salt="a", params={"kvpool": {"tenant": "team"}}).tenant == "team"
