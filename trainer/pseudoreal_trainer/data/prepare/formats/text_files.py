"""Text and JSON lines."""

import codecs
import json
from collections.abc import Iterator
from functools import partial

from pseudoreal_trainer.data.prepare.formats.compressed import is_compressed, read_chunks
from pseudoreal_trainer.data.prepare.formats.records import START, Malformed, Mark, Record, Text
from pseudoreal_trainer.data.prepare.reading.files import InputFile

MOST_LINE_BYTES = 256 << 20
"""Maximum number of bytes in a JSON line, which is parsed as a whole."""
PIECE = 1 << 20
"""Maximum number of characters in a piece of text. Texts are cut to bound memory: a tokenizer needs in the order of 100
bytes per character."""


def text_records(file: InputFile) -> Iterator[Record]:
    """Yield the whole file as one record."""
    yield Record("as a whole", file.size, partial(_file_pieces, file))


def json_records(file: InputFile, field: str, begin: Mark = START) -> Iterator[Record]:
    """Yield one record per line from `begin` on, an object with its text in `field`. Empty lines are skipped."""
    is_plain = not is_compressed(file)
    for number, (line, position, byte) in enumerate(_lines(file, begin.byte), start=begin.number + 1):
        end = Mark(number, byte) if is_plain else None
        if line is None:
            yield Record(f"line {number:,}", position, _too_long, end)
        elif line and not line.isspace():
            yield Record(f"line {number:,}", position, partial(_line_text, line, field), end)


def pieces(text: str) -> Iterator[str]:
    """Yield the text; a long text is cut into pieces, at line ends if possible. A tokenizer starts a new word at a line
    end in any case."""
    begin = 0
    while len(text) - begin > PIECE:
        end = _cut(text, begin, begin + PIECE)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _cut(text: str, begin: int, limit: int) -> int:
    """Return the end of a piece: after the last line end that is not followed by whitespace, else before the last
    space, else `limit`."""
    end = limit
    while (end := text.rfind("\n", begin, end)) >= 0:
        if not text[end + 1].isspace():
            return end + 1
    space = text.rfind(" ", begin + 1, limit)
    return space if space > 0 else limit


def _file_pieces(file: InputFile) -> Text:
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    try:
        for content, _ in read_chunks(file):
            text += decoder.decode(content)
            if len(text) > PIECE:
                *whole, text = pieces(text)
                yield from whole
        text += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise Malformed(f"it is not UTF-8 ({error.reason})") from error
    yield text


def _line_text(line: bytes, field: str) -> Text:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON ({error})") from error
    text = found.get(field) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise Malformed(f"it is no object with a text in {field!r}")
    return pieces(text)


def _too_long() -> Text:
    raise Malformed(f"it has more than {MOST_LINE_BYTES:,} bytes; cut it")


def _lines(file: InputFile, begin: int) -> Iterator[tuple[bytes | None, int, int]]:
    """Yield each line without its line end, the number of bytes of the file read so far, and the end of the line in the
    decompressed content. None: the line is too long."""
    begun, position, end = _Line(), begin, begin
    for content, position in read_chunks(file, begin):
        first, *others = content.split(b"\n")
        begun.append(first)
        if others:
            end += begun.size + 1
            yield begun.take(), position, end
            *whole, last = others
            for line in whole:
                end += len(line) + 1
                yield line, position, end
            begun.append(last)
    if begun.size:
        end += begun.size
        yield begun.take(), position, end


class _Line:
    """A line of limited size; a longer line is discarded while it is read."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the line so far."""
        self._parts: list[bytes] = []

    def append(self, part: bytes) -> None:
        self.size += len(part)
        if self.size <= MOST_LINE_BYTES:
            self._parts.append(part)
        else:
            self._parts.clear()

    def take(self) -> bytes | None:
        """Return the line and start the next one; None if the line is too long."""
        line = b"".join(self._parts) if self.size <= MOST_LINE_BYTES else None
        self.size, self._parts = 0, []
        return line
