"""Files of other programs, byte by byte from the descriptions of their formats."""

MEGATRON_INDEX = bytes.fromhex(
    "4d4d4944494458 0000"  # MMIDIDX
    "0100000000000000"  # version
    "08"  # uint16
    "0200000000000000 0300000000000000"  # 2 sequences, 3 ends of documents
    "03000000 02000000"  # lengths
    "0000000000000000 0600000000000000"  # pointers
    "0000000000000000 0100000000000000 0200000000000000"  # documents
)
"""The documents [1, 2, 3] and [4, 5]."""
FIVE = bytes.fromhex("0100 0200 0300 0400 0500")
NUMPY_HEADER = (
    b"\x93NUMPY\x01\x00\x76\x00" + (b"{'descr': '<u2', 'fortran_order': False, 'shape': (5,), }").ljust(117) + (b"\n")
)
