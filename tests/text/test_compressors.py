"""The compressors beside a language model: what they give is what their programs give."""

import lzma
import random
import shutil
import subprocess

import pytest

from clearhead.text import compressors
from clearhead.text.compressors import bits_per_byte, gzip_bits, primed_xz_bits, xz_bits

TEXT = b"".join(b"the %d small cats find %d old birds\n" % (i, i * i) for i in range(2000))
NOISE = random.Random(0).randbytes(5000)


@pytest.mark.parametrize(("program", "bits"), [(["gzip", "-9"], gzip_bits), (["xz", "-9e"], xz_bits)])
def test_sizes_are_those_of_the_programs(program, bits):
    """Within the few bytes in which file headers differ, and 2 % for another implementation of deflate."""
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    size = len(subprocess.run([*program, "-c"], input=TEXT, capture_output=True, check=True).stdout)
    assert bits(TEXT) * len(TEXT) / 8 == pytest.approx(size, rel=0.02, abs=32)


def test_what_is_known_costs_nothing():
    """A text that the primer holds is only pointed at, noise costs its 8 bits, a pattern next to nothing."""
    assert primed_xz_bits(NOISE, NOISE) < 0.2
    assert 8 <= xz_bits(NOISE) < 8.3
    assert 8 <= gzip_bits(NOISE) < 8.3
    assert gzip_bits(bytes(100_000)) < 0.02


def test_the_primed_compressor_is_the_fair_rival():
    """It has read the training text: less than alone, more than nothing."""
    primer, text = TEXT[:60_000], TEXT[60_000:]
    assert 0 < primed_xz_bits(text, primer) < xz_bits(text)


def test_the_dictionary_reaches_back_over_all(monkeypatch):
    """xz's own has 64 MiB; a longer primer needs a longer one, up to what the format knows."""
    sizes = []

    def compress(data, format, filters):
        sizes.append(filters[0]["dict_size"])
        return b""

    monkeypatch.setattr(lzma, "compress", compress)

    class Long(bytes):
        def __len__(self):
            return 2 << 30

    for data in (b"short", bytes(65 << 20), Long()):
        compressors._xz(data)
    assert sizes == [64 << 20, 65 << 20, 1536 << 20]


def test_an_empty_text_has_no_bits_per_byte():
    for measure in (gzip_bits, xz_bits, lambda text: primed_xz_bits(text, b"primer")):
        with pytest.raises(ValueError, match="empty text"):
            measure(b"")
    assert bits_per_byte(1, b"1234") == 2
