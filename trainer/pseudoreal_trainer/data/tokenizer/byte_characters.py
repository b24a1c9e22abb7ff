"""The characters that byte-level BPE writes for bytes (Radford et al. 2019, GPT-2)."""


def _characters() -> list[str]:
    """The character for each byte: itself if it can be seen, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


BYTE_CHARACTERS = _characters()
