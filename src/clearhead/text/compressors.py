"""What file compressors make of a text: the yardstick beside a language model's bits per byte.

A language model that gives the text probability p stores it in -log2 p bits (with arithmetic coding), so bits
per byte of the two are the same measure. The fair rival is the primed compressor: it has read the training
text too.
"""

import gzip
import lzma


def gzip_bits(text: bytes) -> float:
    """Bits per byte of `gzip -9`."""
    return bits_per_byte(len(gzip.compress(text, compresslevel=9)), text)


def xz_bits(text: bytes) -> float:
    """Bits per byte of `xz -9e`."""
    return bits_per_byte(len(_xz(text)), text)


def primed_xz_bits(text: bytes, primer: bytes) -> float:
    """Bits per byte that `text` adds to `xz -9e` of the `primer` before it, dictionary as large as both."""
    return bits_per_byte(len(_xz(primer + text)) - len(_xz(primer)), text)


def bits_per_byte(compressed_size: int, text: bytes) -> float:
    """8 x compressed bytes / bytes."""
    if not text:
        raise ValueError("an empty text has no bits per byte")
    return 8 * compressed_size / len(text)


def _xz(data: bytes) -> bytes:
    """`data` as xz -9e with a dictionary that reaches back over all of it."""
    dictionary = min(max(len(data), 64 << 20), 1536 << 20)  # at least xz's own, at most what it can use
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary}]
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters)
