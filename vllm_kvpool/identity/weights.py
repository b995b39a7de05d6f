"""The identity of weights: a sample of their files.

Two models of one name and one shape must never share KV, so their weights' identity is part of the
namespace. Reading a large model whole would take minutes, so a few short pieces of every tensor of
every safetensors file are read. Some trainings change a few tokens or experts alone: of embeddings
a piece of every row is read, and of experts in one tensor pieces of each expert. Other files are
sampled at equal distances. LoRA adapters are small and are read whole. Weights are a directory, or
one file with those that it is split into.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from vllm_kvpool.parsing import UNREADABLE

DIGEST_BYTES = 16
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PIECE_BYTES = 64
PIECES_PER_TENSOR = 3
PIECES_PER_OTHER_FILE = 256
MIN_MATRIX_BYTES = 1024  # smaller parts of a tensor with three or more dimensions are no experts
READ_BYTES = 8 << 20  # of embeddings, at a time: in order, which disks read ahead
_EMBEDDINGS = re.compile("emb|wte")
MAX_SAFETENSORS_HEADER = 100 << 20
ADAPTER_FILES = (*WEIGHT_SUFFIXES, ".json")
# Folders of adapters that Jina's embeddings merge into their weights: one for each task.
FOLDERS_OF_TASKS = tuple(
    f"adapters/{task}" for task in ("classification", "clustering", "retrieval", "text-matching")
)
# Folders of a model's directory that models of vLLM read weights from, too.
FOLDERS_OF_WEIGHTS = (
    *FOLDERS_OF_TASKS,
    *("audio_tokenizer", "transformer", "vision_encoder", "whisper-large-v3"),
)
# Which safetensors files vLLM reads, where a directory has more: of each form one.
INDEXES = {
    "consolidated": "consolidated.safetensors.index.json",
    "": "model.safetensors.index.json",
}
_SPLIT = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
SETTLED_NS = 2_000_000_000  # the coarsest file systems keep times to two seconds


class FileState(NamedTuple):
    """The values that change when a file is written to or replaced."""

    name: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the present state of a file; OSError if there is none."""
        s = path.stat()
        return cls(path.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)


_samples: dict[Path, tuple[tuple[FileState, ...], str]] = {}
"""Path -> the state of its files, and their sample."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header; `__metadata__` has no offsets."""

    data_offsets: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()


class _Index(msgspec.Struct):
    """An index of safetensors files: tensor -> file."""

    weight_map: dict[str, str]


class _Span(NamedTuple):
    """Bytes of a file that are sampled: `pieces` of them, or the beginning of every row."""

    start: int
    stop: int
    pieces: int
    row_bytes: int = 0


def folders_in(directory: Path, names: Iterable[str]) -> list[Path]:
    """Return the folders of a directory with these names that are there."""
    return [folder for name in names if (folder := directory / name).is_dir()]


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a directory, or of a file and its other parts. Raises OSError.

    A file named as one of several (`-00001-of-00003`) stands for all of them.
    """
    if path.is_dir():
        folders = [path, *folders_in(path, FOLDERS_OF_WEIGHTS)]
        files = (each for folder in folders for each in folder.iterdir())
        return sorted(p for p in files if p.suffix in WEIGHT_SUFFIXES and p.is_file())
    own = _SPLIT.fullmatch(path.name)
    if own is None:
        return [path]
    others = ((each, _SPLIT.fullmatch(each.name)) for each in path.parent.iterdir())
    return sorted(
        each
        for each, match in others
        if match and match.group("name", "count", "suffix") == own.group("name", "count", "suffix")
    )


def _index_files(path: Path) -> list[Path]:
    return [each for name in INDEXES.values() if (each := path / name).is_file()]


def _left_out(path: Path) -> set[Path]:
    """Return the safetensors files of a directory that vLLM does not read: an index has others."""
    unread: set[Path] = set()
    seen: set[Path] = set()
    for prefix, name in INDEXES.items():
        files = set(path.glob(f"{prefix}*.safetensors")) - seen
        seen |= files
        try:
            index = msgspec.json.decode((path / name).read_bytes(), type=_Index)
        except (FileNotFoundError, NotADirectoryError, *UNREADABLE):
            continue  # none, or one that vLLM cannot read either
        unread |= files - {path / each for each in index.weight_map.values()}
    return unread


def sample_weights(path: Path) -> str | None:
    """Return a hex digest of a sample of the weight files, or None if there are none.

    Reads about 200 bytes a tensor, and embeddings whole. Raises OSError.
    """
    files = weight_files(path)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    unread = _left_out(path)
    for each in files:
        size = each.stat().st_size
        mark = ":unread" if each in unread else ""
        digest.update(f"{each.name}:{size}{mark}\n".encode())
        with each.open("rb", buffering=0) as file:
            header = _safetensors_header(file.read(8), size) if each.suffix == ".safetensors" else 0
            text = file.read(header)
            digest.update(text)
            spans = _tensor_spans(text, 8 + header, size)
            for span in spans or [_Span(0, size, PIECES_PER_OTHER_FILE)]:
                for piece in _rows(file, span) if span.row_bytes else _pieces(file, span):
                    digest.update(piece)
    return digest.hexdigest()


def _pieces(file: BinaryIO, span: _Span) -> Iterator[bytes]:
    start, size = span.start, span.stop - span.start
    for i in range(span.pieces):
        file.seek(start + max(0, size - PIECE_BYTES) * i // max(1, span.pieces - 1))
        yield file.read(min(PIECE_BYTES, size))


def _rows(file: BinaryIO, span: _Span) -> Iterator[bytes | memoryview]:
    row = span.row_bytes
    piece = min(row, PIECE_BYTES)
    step = max(1, READ_BYTES // row) * row
    file.seek(span.start)
    for start in range(span.start, span.stop, step):
        block = memoryview(file.read(min(step, span.stop - start)))
        whole = piece == row
        yield (
            block if whole else b"".join(block[at : at + piece] for at in range(0, len(block), row))
        )


def known_sample(path: Path, clock_ns: Callable[[], int] = time.time_ns) -> str | None:
    """Return `sample_weights` of files; unchanged files are read once in a process.

    A file counts as unchanged if size, times and inode are the same, unless the last write before
    the read was less than `SETTLED_NS` ago: a later write might not change the file's times.
    """
    began_ns = clock_ns()
    state = tuple(map(FileState.of, [*weight_files(path), *_index_files(path)]))
    known = _samples.get(path)
    if known is not None and known[0] == state:
        return known[1]
    sampled = sample_weights(path)
    newest_ns = max((max(file.mtime_ns, file.ctime_ns) for file in state), default=0)
    if sampled is not None and newest_ns + SETTLED_NS < began_ns:
        _samples[path] = state, sampled
    return sampled


def changed_ns(path: Path) -> int:
    """Return when the newest weight file was written, replaced or moved here. Raises OSError."""
    files = [*weight_files(path), *_index_files(path)]
    return max((FileState.of(each).ctime_ns for each in files), default=0)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors in the safetensors files, by name. Raises OSError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in weight_files(path):
        if each.suffix == ".safetensors":
            with each.open("rb", buffering=0) as file:
                text = file.read(_safetensors_header(file.read(8), each.stat().st_size))
            shapes |= {name: tensor.shape for name, tensor in _tensors(text).items()}
    return shapes


def _safetensors_header(first: bytes, size: int) -> int:
    """Return the header's length; 0 if this is no safetensors file."""
    length = int.from_bytes(first, "little")
    return length if 0 < length <= min(size - 8, MAX_SAFETENSORS_HEADER) else 0


def _tensor_spans(header: bytes, data_start: int, size: int) -> list[_Span]:
    """Return the spans that are sampled of each tensor; none if the header is malformed."""
    tensors = _tensors(header)
    spans = []
    for name in sorted(tensors):
        offsets, shape = tensors[name].data_offsets, tensors[name].shape
        if offsets is not None and 0 <= offsets[0] < offsets[1] <= size - data_start:
            start, stop = (data_start + offset for offset in offsets)
            rows = shape[0] if len(shape) > 1 and _EMBEDDINGS.search(name) else 0
            has_rows = rows > 0 and (stop - start) % rows == 0
            row_bytes = (stop - start) // rows if has_rows else 0
            pieces = PIECES_PER_TENSOR * _num_experts(shape, stop - start)
            spans.append(_Span(start, stop, pieces, row_bytes))
    return spans


def _num_experts(shape: tuple[int, ...], size: int) -> int:
    """Return the number of matrices in a tensor of `size` bytes."""
    if len(shape) < 3 or not 0 < shape[0] * MIN_MATRIX_BYTES <= size:
        return 1
    return shape[0]


def _tensors(header: bytes) -> dict[str, _Tensor]:
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except UNREADABLE:
        return {}
    return {name: tensor for name, tensor in tensors.items() if tensor.data_offsets is not None}


def digest_adapter(directory: Path) -> bytes:
    """Return a digest of a LoRA adapter's weights and configuration."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    files = _adapter_files(directory)
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise FileNotFoundError(f"no adapter weights in {directory}")
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def adapter_stamp(directory: Path) -> tuple[FileState, ...]:
    """Return the states of the files that `digest_adapter` reads; writing a file changes its."""
    return tuple(map(FileState.of, _adapter_files(directory)))


def _adapter_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.suffix in ADAPTER_FILES and p.is_file())
