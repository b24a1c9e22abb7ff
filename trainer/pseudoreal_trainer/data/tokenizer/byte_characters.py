"""The characters that represent bytes in byte-level BPE (Radford et al. 2019, GPT-2)."""


def _characters() -> list[str]:
    """Return the character for each byte: the byte's own character if it is visible, else a character from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


BYTE_CHARACTERS = _characters()
