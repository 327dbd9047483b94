"""What is read, what is left out, and what is kept from training."""

import pytest

from ssd.training.corpus import HELD_OUT, Document, function_heads, standard_library, text_files


@pytest.fixture
def library(tmp_path):
    """A library of a few files below a folder."""

    def write(**files: str):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def names(documents):
    return [document.name for document in documents]


def test_held_out_modules_and_their_tests_are_kept_from_training_whole(library):
    folder = library(
        heapq="x = one",
        json__decoder="y = two",
        test__test_json__test_dump="z = three",
        test__test_csv="a = b",
        other="c = d",
        csvlike="e = f",
    )
    train, held_out = standard_library(folder)
    assert names(train) == ["csvlike.py", "other.py"]
    assert names(held_out) == ["heapq.py", "json/decoder.py", "test/test_csv.py", "test/test_json/test_dump.py"]


def test_installed_packages_character_tables_and_data_are_left_out(library):
    table = "table = [" + ", ".join(map(str, range(100, 200))) + "]"
    folder = library(heapq="x = y", site__package="p = q", encodings__cp1252="x = y", lib2to3__bad="x = y", numbers=table, plain="a = b")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "numpy.py").write_text("import this")
    train, _ = standard_library(folder)
    assert names(train) == ["plain.py", "site/package.py"]


def test_a_file_is_read_in_its_own_encoding_and_a_broken_one_left_out(library):
    folder = library(heapq="x = y")
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# A comment in prose, with an é in it.\n".encode("latin-1"))
    (folder / "broken.py").write_bytes(b"text = '\xff'")
    train, _ = standard_library(folder)
    assert names(train) == ["latin.py"]
    assert "é" in train[0].text


def test_a_folder_without_sources_is_refused(tmp_path, library):
    with pytest.raises(ValueError, match="lacks the Python standard library's sources"):
        standard_library(tmp_path)
    library(only="x = y")
    with pytest.raises(ValueError, match="lacks"):
        standard_library(tmp_path)


def test_the_real_library_has_megabytes_to_train_on_and_every_held_out_module():
    train, held_out = standard_library()
    assert sum(len(document.text) for document in train if not document.is_test) > 5e6
    assert {document.name.split("/")[0].removesuffix(".py") for document in held_out if not document.is_test} == set(HELD_OUT)
    assert not any(document.is_held_out for document in train)


def test_function_heads_end_with_the_docstring_and_stand_at_the_margin():
    text = 'class A:\n    def f(self):\n        """Do it.\n\n        Now."""\n        return 1\n\ndef g():\n    return 2\n'
    test = Document("test/test_a.py", 'def h():\n    """Test."""\n')
    heads = function_heads([Document("a.py", text), test])
    assert heads == ['def f(self):\n    """Do it.\n\n    Now."""']
    assert function_heads([Document("a.py", text)], longest=10) == []


def test_text_files_that_cannot_be_used_are_named(tmp_path):
    good, empty, binary = tmp_path / "good.txt", tmp_path / "empty.txt", tmp_path / "binary.txt"
    good.write_text("words")
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\xff")
    assert [document.text for document in text_files([good])] == ["words"]
    for path, complaint in ((empty, "is empty"), (binary, "cannot be read as UTF-8"), (tmp_path / "none.txt", "cannot be read")):
        with pytest.raises(ValueError, match=f"--text=.*{path.name}.* {complaint}"):
            text_files([path])
