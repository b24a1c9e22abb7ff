"""The bytes of manifest.json, written and read fast: repeated content is processed once.

Pieces of tensors make up nearly all of a manifest: 6.7 MB for 80 blocks on 1,024 ranks. Blocks of one shape have the
same pieces, so each distinct list of pieces is serialized once, and each distinct text is parsed once. The output is
byte for byte the output of pydantic for the whole manifest with an indentation of one space:

    {
     "format": "pseudoreal checkpoint",
     ...                                      the head
     "tensors": {
      "embedding.weight": {
       ...
      },
      ...
     },
     "files": {
      ...
     }
    }

A manifest in any other layout, or of an earlier version, is parsed as a whole. A JSON string contains no line break, so
the markers below match only at their own places.
"""

import json

from pydantic import TypeAdapter
from pydantic_core import to_json

from pseudoreal_trainer.checkpoint.manifest import FORMAT_VERSION, FileDigest, FileName, Head, Manifest, StoredTensor

_BEGINNING = f'{{\n "format": "pseudoreal checkpoint",\n "formatVersion": {FORMAT_VERSION},'
_TENSORS, _FILES, _END = ',\n "tensors": {', ',\n "files": {', "\n}"
_FILES_TYPE = TypeAdapter(dict[FileName, FileDigest])


def manifest_text(manifest: Manifest) -> str:
    """Return the content of manifest.json. Raises ValueError if a number in the manifest is not finite."""
    head = manifest.head.to_json(indent=1).removesuffix(_END)
    files = _FILES_TYPE.dump_json(manifest.files, indent=1).decode().replace("\n", "\n ")
    return f"{head}{_TENSORS}{_tensors_text(manifest)}}}{_FILES}{files[1:]}{_END}"


def _tensors_text(manifest: Manifest) -> str:
    # Keyed by identity: comparing lists of pieces takes as long as writing them.
    texts = {id(tensor): tensor for tensor in manifest.tensors.values()}
    made = {number: tensor.to_json(indent=1).replace("\n", "\n  ") for number, tensor in texts.items()}
    lines = ",".join(f"\n  {to_json(name).decode()}: {made[id(one)]}" for name, one in manifest.tensors.items())
    return f"{lines}\n " if lines else ""


def manifest_in(text: bytes) -> Manifest:
    """Return the manifest with this content. Raises ValidationError. Tensors with the same pieces are one object."""
    try:
        found = _by_parts(text)
    except ValueError:
        found = None  # the whole text may still be valid; if not, pydantic's error names the place
    return found or Manifest.model_validate_json(text)


def head_in(text: bytes) -> Head | None:
    """Return the head of the manifest that starts with this text; None if the text ends inside the head or has another
    layout. Raises ValidationError."""
    end = text.find(_TENSORS.encode())
    return None if end < 0 else Head.model_validate_json(text[:end] + _END.encode())


def is_end(text: bytes) -> bool:
    """Return True if a manifest may end with this text. A truncated manifest does not."""
    return text.rstrip().endswith(_END.encode())


def _by_parts(text: bytes) -> Manifest | None:
    """Return the manifest; None if the text has another layout or version. Raises ValueError."""
    begin, end = text.find(_TENSORS.encode()), text.rfind(_FILES.encode())
    if not text.startswith(_BEGINNING.encode()) or begin < 0 or end < begin or not is_end(text):
        return None
    tensors = _tensors_in(text[begin + len(_TENSORS) : end])
    if tensors is None:
        return None
    head = Head.model_validate_json(text[:begin] + _END.encode())
    files = _FILES_TYPE.validate_json(text[end + len(_FILES) - 1 :].rstrip().removesuffix(_END.encode()))
    return Manifest.model_validate({**dict(head), "tensors": tensors, "files": files})


def _tensors_in(text: bytes) -> dict[str, StoredTensor] | None:
    """Return the tensors in a text between braces; the text includes the closing brace. None if the text has another
    layout. Raises ValueError."""
    found: dict[str, StoredTensor] = {}
    known: dict[bytes, StoredTensor] = {}
    position = 0
    while text[position : position + 4] != (b"\n }" if found else b"}"):
        separator = b",\n  " if found else b"\n  "
        middle, end = text.find(b'": {\n', position) + 3, text.find(b"\n  }", position) + 4
        if not text.startswith(separator, position) or not position < middle < end:
            return None
        tensor = text[middle:end]
        if tensor not in known:
            known[tensor] = StoredTensor.model_validate_json(tensor)
        found[json.loads(text[position + len(separator) : middle - 2])] = known[tensor]
        position = end
    return found
