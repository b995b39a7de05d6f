"""Identity of weights: equal files anywhere have one digest, a changed tensor has another."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.support.buffers import random_bytes
from vllm_kvpool.identity.weights import (
    DIGEST_BYTES,
    FOLDERS_OF_WEIGHTS,
    PIECE_BYTES,
    PIECES_PER_OTHER_FILE,
    READ_BYTES,
    digest_adapter,
    known_sample,
    sample_weights,
)

SIZES = {"small": 3, "piece": 64, "empty": 0, "large": 100_000, "odd": 129}
HOSTILE_HEADERS = (
    *(b"", b"{", b"\xff\xfe", b"[]", b"[1]", b'["a"]', b"null", b"1", b'"text"', b"true"),
    *(b"[" * 100_000, b'{"a": 1}', b'{"a": null}', b'{"a": []}', b'{"a": "data_offsets"}'),
    *(b'{"a": {"data_offsets": 5}}', b'{"a": {"data_offsets": []}}'),
    *(b'{"a": {"data_offsets": [0]}}', b'{"a": {"data_offsets": ["0", "8"]}}'),
    *(b'{"a": {"data_offsets": {"0": 1}}}', b'{"a": {"data_offsets": [null, null]}}'),
    *(b'{"a": {"data_offsets": [-100, -1]}}', b'{"a": {"data_offsets": [8, 0]}}'),
    *(b'{"a": {"data_offsets": [0, 1e99]}}', b'{"a": {"data_offsets": [0.5, 8.5]}}'),
    b'{"a": {"data_offsets": [0, 99999999999999999999999999]}}',
    b'{"a": {"data_offsets": [99999999999999999999999999, 99999999999999999999999999]}}',
    b'{"a": {"data_offsets": [0, 9223372036854775807]}}',
    *(b'{"__metadata__": 5}', b'{"__metadata__": {"data_offsets": [0, 8]}}', b"NaN"),
)


def write_safetensors(directory: Path, sizes: dict[str, int] = SIZES, seed: int = 0) -> Path:
    offsets, place = {}, 0
    for name, size in sizes.items():
        offsets[name] = {"dtype": "U8", "shape": [size], "data_offsets": [place, place + size]}
        place += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **offsets}).encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + random_bytes(place, seed))
    return path


def data_start(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_the_same_files_elsewhere_are_the_same(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        path = write_safetensors(directory)
        (directory / "second.safetensors").symlink_to(path)
        (directory / "config.json").write_text(directory.name)
        (directory / "subdirectory.bin").mkdir()
    os.utime(other / "model.safetensors", (1, 1))
    digest = sample_weights(one)
    assert digest is not None
    assert digest == sample_weights(other)
    assert len(bytes.fromhex(digest)) == DIGEST_BYTES


def test_no_weights_have_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert sample_weights(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        sample_weights(tmp_path / "absent")


def tensor_places() -> list[tuple[str, int]]:
    return [
        (name, offset)
        for name, size in SIZES.items()
        for offset in sorted({0, size // 2, size - 1})
        if 0 <= offset < size
    ]


@pytest.mark.parametrize(("name", "offset"), tensor_places())
def test_a_changed_byte_at_any_end_or_the_middle_of_a_tensor_is_seen(
    tmp_path: Path, name: str, offset: int
) -> None:
    path = write_safetensors(tmp_path)
    before = sample_weights(tmp_path)
    names = list(SIZES)
    start = sum(SIZES[n] for n in names[: names.index(name)])
    change(path, data_start(path) + start + offset)
    assert sample_weights(tmp_path) != before


@pytest.mark.parametrize("expert", [0, 1, 17, 30, 31])
def test_a_changed_expert_of_many_in_one_tensor_is_seen(tmp_path: Path, expert: int) -> None:
    """Some trainings change a few experts, and gpt-oss and Llama 4 keep all in one tensor."""
    experts, rows, columns = 32, 64, 48
    size = experts * rows * columns
    tensor = {"dtype": "U8", "shape": [experts, rows, columns], "data_offsets": [0, size]}
    header = json.dumps({"model.layers.0.mlp.experts.down_proj": tensor}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + random_bytes(size, 0))
    before = sample_weights(tmp_path)
    with path.open("r+b") as file:
        file.seek(data_start(path) + expert * rows * columns)
        file.write(random_bytes(rows * columns, 1))
    assert sample_weights(tmp_path) != before


def test_weights_in_a_folder_that_models_read_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    samples = {sample_weights(tmp_path)}
    for folder in FOLDERS_OF_WEIGHTS:
        for seed in (1, 2):
            write_safetensors(tmp_path / folder, seed=seed)
            samples.add(sample_weights(tmp_path))
    for folder in ("original", "adapters/of-a-user"):
        write_safetensors(tmp_path / folder)
    assert sample_weights(tmp_path) in samples
    assert len(samples) == 1 + 2 * len(FOLDERS_OF_WEIGHTS)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.wte.weight"])
@pytest.mark.parametrize("columns", [16, 100, 700])
def test_a_changed_row_of_embeddings_is_seen(tmp_path: Path, name: str, columns: int) -> None:
    """Some trainings change the embeddings of a few tokens, and nothing else."""
    rows = 3 * READ_BYTES // 2 // 700
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [rows, columns], "data_offsets": [0, rows * columns]}}
    ).encode()
    path = tmp_path / "model.safetensors"
    data = random_bytes(rows * columns, 0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    before = sample_weights(tmp_path)
    for row in (0, 1, rows // 3, rows - 2, rows - 1):
        place = data_start(path) + row * columns
        change(path, place)
        assert sample_weights(tmp_path) != before, row
        change(path, place)
    assert sample_weights(tmp_path) == before


@pytest.mark.parametrize("shape", [[0, 4], [7, 3], [-1, 5], [10**30, 2], [2**63, 2], ["2", 3], 5])
def test_embeddings_of_an_impossible_shape_are_sampled(tmp_path: Path, shape: object) -> None:
    tensor = {"dtype": "U8", "shape": shape, "data_offsets": [0, 1000]}
    header = json.dumps({"embed": tensor}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + random_bytes(1000, 0))
    before = sample_weights(tmp_path)
    change(path, data_start(path) + 999)
    assert sample_weights(tmp_path) != before


def write_index(directory: Path, name: str, *files: str) -> None:
    text = json.dumps({"weight_map": {f"tensor{i}": file for i, file in enumerate(files)}})
    (directory / f"{name}.safetensors.index.json").write_text(text)


def test_the_files_that_an_index_chooses_count(tmp_path: Path) -> None:
    """vLLM does not read the others: of an earlier save, for example."""
    for name in ("a", "b"):
        write_safetensors(tmp_path, seed=ord(name)).rename(tmp_path / f"{name}.safetensors")
    without = sample_weights(tmp_path)
    write_index(tmp_path, "model", "a.safetensors", "b.safetensors")
    assert sample_weights(tmp_path) == without
    seen = {without}
    for name in ("a", "b"):
        write_index(tmp_path, "model", f"{name}.safetensors")
        assert known_sample(tmp_path, lambda: 1 << 62) == sample_weights(tmp_path)
        seen.add(sample_weights(tmp_path))
    assert len(seen) == 3


def test_an_index_chooses_among_files_of_its_form(tmp_path: Path) -> None:
    """Mistral's own weights, which vLLM takes first, may lie beside those of another form."""
    for name in ("consolidated-1", "consolidated-2", "a"):
        write_safetensors(tmp_path, seed=len(name)).rename(tmp_path / f"{name}.safetensors")
    without = sample_weights(tmp_path)
    write_index(tmp_path, "model", "a.safetensors")
    assert sample_weights(tmp_path) == without
    write_index(tmp_path, "consolidated", "consolidated-1.safetensors")
    assert sample_weights(tmp_path) != without


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_says_nothing_leaves_nothing_out(tmp_path: Path, text: str) -> None:
    write_safetensors(tmp_path)
    without = sample_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert sample_weights(tmp_path) == without


def test_name_size_and_number_of_files_count(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path)
    seen = {sample_weights(tmp_path)}
    path.rename(tmp_path / "renamed.safetensors")
    seen.add(sample_weights(tmp_path))
    (tmp_path / "more.bin").write_bytes(b"x")
    seen.add(sample_weights(tmp_path))
    (tmp_path / "more.bin").write_bytes(b"xx")
    seen.add(sample_weights(tmp_path))
    write_safetensors(tmp_path, SIZES | {"more": 0})
    seen.add(sample_weights(tmp_path))
    assert len(seen) == 5


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 500_000])
def test_other_files_are_sampled_from_end_to_end(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_bytes(size, 1))
    seen = {sample_weights(tmp_path)}
    inner = max(0, size - PIECE_BYTES) * 100 // (PIECES_PER_OTHER_FILE - 1)
    places = {0, inner, size - 1} if size else set()
    for offset in places:
        change(path, offset)
        seen.add(sample_weights(tmp_path))
    assert len(seen) == 1 + len(places)


@pytest.mark.parametrize("length", range(0, 400, 13))
def test_a_truncated_file_is_sampled(tmp_path: Path, length: int) -> None:
    path = write_safetensors(tmp_path, {"a": 100})
    whole = sample_weights(tmp_path)
    with path.open("r+b") as file:
        file.truncate(min(length, path.stat().st_size - 1))
    assert sample_weights(tmp_path) not in (None, whole)


def test_a_hostile_header_is_sampled(tmp_path: Path) -> None:
    for header in HOSTILE_HEADERS:
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        assert sample_weights(tmp_path) is not None


def test_weights_behind_a_broken_header_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    seen = set()
    for data in (b"x" * 100, b"y" * 100):
        path.write_bytes((1).to_bytes(8, "little") + b"{" + data)
        seen.add(sample_weights(tmp_path))
    assert len(seen) == 2


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_data(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    seen = set()
    for data in (b"x" * 100, b"y" * 100):
        path.write_bytes(length.to_bytes(8, "little") + data)
        seen.add(sample_weights(tmp_path))
    assert len(seen) == 2


def write_adapter(directory: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text(config)
    return directory


def test_an_adapter_is_its_content(tmp_path: Path) -> None:
    base = digest_adapter(write_adapter(tmp_path / "a"))
    same = write_adapter(tmp_path / "b")
    (same / "README.md").write_text("about")
    assert digest_adapter(same) == base
    assert len(base) == DIGEST_BYTES
    others = [
        digest_adapter(write_adapter(tmp_path / "c", weights=b"Weights")),
        digest_adapter(write_adapter(tmp_path / "d", config='{"r": 8}')),
        digest_adapter(write_adapter(tmp_path / "e", weights=b"weights" + bytes(1))),
    ]
    assert len({base, *others}) == 4


def test_every_bit_of_an_adapter_counts(tmp_path: Path) -> None:
    weights = bytearray(5000)
    base = digest_adapter(write_adapter(tmp_path / "a", bytes(weights)))
    weights[2500] ^= 1
    assert digest_adapter(write_adapter(tmp_path / "b", bytes(weights))) != base


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no adapter weights"):
        digest_adapter(tmp_path)


def headers() -> SearchStrategy[bytes]:
    values = st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
        max_leaves=5,
    )
    tensors = st.dictionaries(
        st.just("data_offsets"), st.lists(st.integers(0, 2**70), min_size=2, max_size=2)
    )
    return st.dictionaries(st.text(max_size=3), tensors | values, max_size=3).map(
        lambda x: json.dumps(x).encode()
    )


@given(header=headers())
def test_any_header_is_sampled(tmp_path_factory: pytest.TempPathFactory, header: bytes) -> None:
    directory = tmp_path_factory.getbasetemp() / "fuzzed"
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert sample_weights(directory) is not None


# Read once in a process


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Files with as many tensors as a model of experts has in a few layers."""
    sizes = {f"layers.{i}.experts.weight": 96 for i in range(NUM_TENSORS)}
    for seed in range(2):
        write_safetensors(tmp_path, sizes, seed).rename(tmp_path / f"part-{seed}.safetensors")
    return tmp_path


NUM_TENSORS = 2_000


def later() -> int:
    """A clock by which the files were written long ago."""
    return time.time_ns() + 60 * 10**9


def reads() -> int:
    """Return the number of read system calls of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("syscr")).split()[1])


def test_files_are_read_once_in_a_process(large: Path) -> None:
    counts, sampled = [], []
    for _ in range(3):
        before = reads()
        sampled.append(known_sample(large, later))
        counts.append(reads() - before)
    assert sampled == [sample_weights(large)] * 3
    assert counts[0] >= 2 * 3 * NUM_TENSORS
    assert max(counts[1:]) < 10


def test_a_file_that_was_written_to_is_read_again(large: Path) -> None:
    before = known_sample(large, later)
    path = large / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert known_sample(large, later) == sample_weights(large) != before
    path.unlink()
    assert known_sample(large, later) == sample_weights(large)


def test_file_with_other_bytes_and_its_former_time_is_read_again(large: Path) -> None:
    """Some tools write in place and restore the modification time."""
    before, path = known_sample(large, later), large / "part-0.safetensors"
    written_ns = path.stat().st_mtime_ns
    change(path, path.stat().st_size - 1)
    os.utime(path, ns=(written_ns, written_ns))
    assert known_sample(large, later) == sample_weights(large) != before


def test_files_that_were_written_just_now_may_still_change_unseen(large: Path) -> None:
    assert known_sample(large) == sample_weights(large)
    before = reads()
    known_sample(large)
    assert reads() - before > NUM_TENSORS


def test_a_single_file_is_sampled_by_its_content(tmp_path: Path) -> None:
    seen = set()
    for number in (1, 2):
        path = tmp_path / str(number) / "model.gguf"
        path.parent.mkdir()
        path.write_bytes(random_bytes(5000, number))
        (path.parent / "other.gguf").write_bytes(bytes(number))
        seen |= {sample_weights(path), known_sample(path)}
    assert len(seen) == 2
    same = tmp_path / "same" / "model.gguf"
    same.parent.mkdir()
    same.write_bytes(random_bytes(5000, 1))
    assert sample_weights(same) in seen


def test_a_file_that_is_one_of_several_stands_for_all(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(random_bytes(300, i))
    first = tmp_path / names[0]
    before = sample_weights(first)
    assert before == sample_weights(tmp_path)
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(b"another model")
    assert sample_weights(first) == before
    change(tmp_path / names[2], 299)
    assert sample_weights(first) != before
