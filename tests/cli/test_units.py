"""Sizes: what people write and what they get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.units import exact_bytes, format_bytes, parse_bytes


@given(st.integers(min_value=0, max_value=1 << 60))
def test_exact_sizes_parse_back(size_bytes: int) -> None:
    """What `config show` prints is read back as the same number of bytes."""
    assert parse_bytes(exact_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("1.5TiB", 3 << 39),
        ("4096", 4096),
        (4096, 4096),
        ("12B", 12),
        ("0.1B0", None),
        ("0.3KiB", None),
        ("64GB", None),
        ("64G", None),
        ("-1", None),
        ("", None),
        (True, None),
        (1.5, None),
        ("lots", None),
    ],
)
def test_only_whole_binary_sizes_are_read(text: object, size_bytes: int | None) -> None:
    """Binary units and plain numbers are read exactly; everything else is refused, not guessed."""
    if size_bytes is not None:
        assert parse_bytes(text) == size_bytes
        return
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


def test_decimal_units_are_refused_with_the_binary_one() -> None:
    """Who writes GB is told to write GiB."""
    with pytest.raises(ValueError, match="write GiB"):
        parse_bytes("64GB")


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (1023 << 30, "1023 GiB"), (1 << 40, "1 TiB")]
)
def test_short_sizes_are_for_reading(size_bytes: int, text: str) -> None:
    """Tables show three digits and a unit."""
    assert format_bytes(size_bytes) == text
