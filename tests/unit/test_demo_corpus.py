"""The demo's text survives the way into Megatron's indexed dataset and back."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from megatron_fsdp_v2_mcore.demo import corpus

DOCUMENTS = [f"topic {number}: naïve “text” — {'x' * number}\n" for number in range(30)]


def test_a_document_is_its_bytes_and_an_end_marker() -> None:
    tokens = corpus.encode("é!")
    assert tokens.tolist() == [0xC3, 0xA9, ord("!"), corpus.END_OF_DOCUMENT]
    assert corpus.decode(tokens) == "é!"


def test_every_twelfth_document_is_for_validation_and_none_is_lost() -> None:
    train, validation = corpus.split(DOCUMENTS)
    assert validation == [DOCUMENTS[0], DOCUMENTS[12], DOCUMENTS[24]]
    assert sorted(train + validation) == sorted(DOCUMENTS)


def test_indexed_datasets_hold_the_documents(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    built = corpus.build(tmp_path, DOCUMENTS)
    train, validation = corpus.split(DOCUMENTS)
    for prefix, documents, tokens in (
        (built.train, train, built.train_tokens),
        (built.validation, validation, built.validation_tokens),
    ):
        dataset = indexed_dataset.IndexedDataset(str(prefix))
        assert [corpus.decode(dataset[index]) for index in range(len(dataset))] == documents
        assert all(dataset[index][-1] == corpus.END_OF_DOCUMENT for index in range(len(dataset)))
        assert dataset.index.dtype == numpy.uint16
        assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
        assert sum(dataset.sequence_lengths) == tokens


def test_the_second_build_keeps_the_first_ones_files(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.datasets.indexed_dataset")
    first = corpus.build(tmp_path, DOCUMENTS)
    written = first.train.with_suffix(".bin").stat().st_mtime_ns
    assert corpus.build(tmp_path, DOCUMENTS) == first
    assert first.train.with_suffix(".bin").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.train.parent.name]


def test_a_failed_build_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(prefix: Path, documents: list[str]) -> None:
        prefix.with_suffix(".bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus, "write_dataset", full_disk)
    with pytest.raises(OSError, match="No space left"):
        corpus.build(tmp_path, DOCUMENTS)
    assert list(tmp_path.iterdir()) == []
    assert not corpus.locate(tmp_path, DOCUMENTS).built


def test_another_text_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    changed = [*DOCUMENTS[:-1], "another ending"]
    assert corpus.locate(tmp_path, DOCUMENTS).train != corpus.locate(tmp_path, changed).train


def test_the_language_reference_is_large_enough_to_train_on(tmp_path: Path) -> None:
    found = corpus.locate(tmp_path)
    assert found.train_tokens > 300_000
    assert 20_000 < found.validation_tokens < found.train_tokens / 5
