"""Text to train on: the sources of the Python standard library that come with the interpreter, or files of the user's."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Modules, and their tests, that no training sees: what a model says of them it has not read.
HELD_OUT = ("argparse", "csv", "fractions", "heapq", "json", "shlex", "statistics", "textwrap")
# Installed packages are not the library's; tables of character sets are no text; lib2to3's tests are broken on purpose.
LEFT_OUT = ("site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__")
# Files with fewer letters and blanks than this are tables of data.
LEAST_PROSE = 0.7


@dataclass(frozen=True, slots=True)
class Document:
    """One file: its path below the folder it was found in, and its text."""

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether it tests the library rather than being it."""
        return any(part in ("test", "tests") or part.startswith("test_") for part in Path(self.name).parts)

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to a module that no training sees."""
        return any(Path(part).stem.removeprefix("test_") in HELD_OUT for part in Path(self.name).parts)


def standard_library(folder: Path | None = None) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those held out, each in the order of their names.

    folder: the library's, by default this interpreter's. ValueError where it holds no source to train on or none to hold out.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    documents = [found for path in sorted(root.rglob("*.py")) if (found := _read_source(root, path)) is not None]
    train = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    if not train or not held_out:
        raise ValueError(f"{str(root)!r} lacks the Python standard library's sources: use an interpreter that comes with them")
    return train, held_out


def _read_source(root: Path, path: Path) -> Document | None:
    name = path.relative_to(root)
    if any(part in LEFT_OUT for part in name.parts):
        return None
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (SyntaxError, UnicodeDecodeError, OSError):
        return None
    prose = sum(character.isalpha() or character.isspace() or character == "_" for character in text)
    return Document(name.as_posix(), text) if text and prose >= LEAST_PROSE * len(text) else None


def text_files(paths: Sequence[Path]) -> list[Document]:
    """Read text files; ValueError names one that cannot be read or is empty."""
    documents = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text={str(path)!r} cannot be read as UTF-8 text: give another file") from error
        if not text.strip():
            raise ValueError(f"--text={str(path)!r} is empty: leave it out")
        documents.append(Document(path.name, text))
    return documents


def function_heads(documents: Sequence[Document], longest: int = 800) -> list[str]:
    """Return the functions of the library's own documents, from `def` to the end of the docstring, of at most `longest` characters."""
    heads: list[str] = []
    for document in documents:
        if document.is_test:
            continue
        lines = document.text.splitlines()
        functions = [node for node in ast.walk(ast.parse(document.text)) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
        heads += [textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])) for node in functions]
    return [head for head in dict.fromkeys(heads) if len(head) <= longest]
