"""The training text: the language reference that every Python carries, as a Megatron indexed dataset.

One topic of ``pydoc_data.topics`` is one document. A token is a byte of its UTF-8 text; one more token marks the end
of a document, so that stock's ``NullTokenizer`` with ``VOCAB_SIZE`` tokens fits as it is.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
VALIDATION_EVERY = 12
FORMAT = b"bytes+eod, every 12th topic for validation, 1"


@dataclass(frozen=True)
class Corpus:
    """Path prefixes (without ``.bin`` / ``.idx``) of the two datasets and their sizes in tokens."""

    train: Path
    validation: Path
    train_tokens: int
    validation_tokens: int

    @property
    def built(self) -> bool:
        """Whether the datasets are there; a folder with half of them never has this name."""
        return self.train.parent.exists()


def load_documents() -> list[str]:
    """The topics of the language reference, sorted by name."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def encode(text: str) -> numpy.ndarray:
    """Tokens of one document: uint16, shape (bytes + 1,), the end marker last."""
    data = numpy.frombuffer(text.encode(), dtype=numpy.uint8).astype(numpy.uint16)
    return numpy.append(data, numpy.uint16(END_OF_DOCUMENT))


def decode(tokens: numpy.ndarray) -> str:
    """The text of a token sequence; end markers are left out."""
    return bytes(tokens[tokens != END_OF_DOCUMENT].astype(numpy.uint8)).decode()


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """(training, validation) documents: every ``VALIDATION_EVERY``-th goes to validation."""
    train = [text for index, text in enumerate(documents) if index % VALIDATION_EVERY]
    return train, documents[::VALIDATION_EVERY]


def locate(folder: Path, documents: list[str] | None = None) -> Corpus:
    """Where the corpus of ``documents`` (default: the language reference) stands or will stand below ``folder``.

    The folder's name carries a digest of the text, so another Python's text never meets a stale file.
    """
    train, validation = split(load_documents() if documents is None else documents)
    home = folder / f"python-reference-{_digest(train, validation)}"
    return Corpus(home / "train", home / "validation", _token_count(train), _token_count(validation))


def build(folder: Path, documents: list[str] | None = None) -> Corpus:
    """The corpus below ``folder``, written unless it is there; several processes may do so at once.

    Raises:
        OSError: ``folder`` can't be written.
    """
    found = locate(folder, documents)
    if not found.built:
        train, validation = split(load_documents() if documents is None else documents)
        folder.mkdir(parents=True, exist_ok=True)
        _build_beside(found.train.parent, {found.train.name: train, found.validation.name: validation})
    return found


def _digest(*parts: list[str]) -> str:
    digest = hashlib.sha256(FORMAT)
    for text in (text for part in parts for text in part):
        digest.update(encode(text).tobytes())
    return digest.hexdigest()[:12]


def _token_count(documents: list[str]) -> int:
    return sum(len(text.encode()) + 1 for text in documents)


def _build_beside(home: Path, datasets: dict[str, list[str]]) -> None:
    """Write to a temporary neighbour, then rename: an interrupted build leaves nothing that looks whole."""
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=home.parent))
    try:
        for name, documents in datasets.items():
            write_dataset(scratch / name, documents)
        scratch.chmod(0o755)
        os.rename(scratch, home)
    except OSError:
        if not home.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_dataset(prefix: Path, documents: list[str]) -> None:
    """Write ``documents`` as ``prefix.bin`` and ``prefix.idx``, one sequence per document."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(VOCAB_SIZE))
    for text in documents:
        builder.add_item(torch.from_numpy(encode(text)))
        builder.end_document()
    builder.finalize(get_idx_path(str(prefix)))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
