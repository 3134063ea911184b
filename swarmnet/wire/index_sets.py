"""Sets of microbatch indexes as bytes: a bitmap or runs, whichever is shorter. Reading is total and bounded."""

from __future__ import annotations

from collections.abc import Iterator


def to_bitmap(indexes: frozenset[int]) -> bytes:
    """Bit i of byte i // 8, least significant first, stands for index i."""
    if not indexes:
        return b""
    assert min(indexes) >= 0, "an index is negative"
    # No longer than the highest index needs.
    bits = bytearray(max(indexes) // 8 + 1)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def bitmap_problem(bits: bytes, below: int) -> str:
    """Why `bits` are no set of indexes below `below`; "" if they are. Trailing zeros are harmless."""
    too_large = len(bits) > -(-below // 8) or (len(bits) == below // 8 + 1 and bits[-1] >> below % 8)
    return f"holds an index of {below} or more" if too_large else ""


def from_bitmap(bits: bytes) -> frozenset[int]:
    """The inverse of `to_bitmap`."""
    return frozenset(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)


_BITMAP, _RUNS = 0, 1


def to_bytes(indexes: frozenset[int]) -> bytes:
    """The shorter of two forms: 0 and a bitmap, or 1 and runs; of nothing, nothing.

    Runs: how many indexes are left out, how many in a row are in it but one, and so on, as varints.
    """
    if not indexes:
        return b""
    runs, end, ordered = bytearray((_RUNS,)), 0, sorted(indexes)
    assert ordered[0] >= 0, "an index is negative"
    most = ordered[-1] // 8 + 2
    for first, last in _runs(ordered):
        _put_varint(runs, first - end)
        _put_varint(runs, last - first)
        end = last + 1
        if len(runs) >= most:
            return bytes((_BITMAP,)) + to_bitmap(indexes)
    return bytes(runs)


def indexes_problem(data: bytes, below: int) -> str:
    """Why `data` are no set of indexes below `below`; "" if they are. Makes no set."""
    if not data:
        return ""
    if data[0] == _BITMAP:
        return bitmap_problem(data[1:], below)
    if data[0] != _RUNS or len(data) > most_set_bytes(below):
        return "is no set of indexes"
    end = 0
    for first, last in _read_runs(data):
        if first < end or last >= below:
            return f"holds an index of {below} or more" if first >= end else "ends in the middle"
        end = last + 1
    return ""


def from_bytes(data: bytes) -> frozenset[int]:
    """The inverse of `to_bytes`, of data without a problem."""
    if not data:
        return frozenset()
    if data[0] == _BITMAP:
        return from_bitmap(data[1:])
    return frozenset(index for first, last in _read_runs(data) for index in range(first, last + 1))


def _runs(ordered: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each row of successive numbers."""
    first = last = ordered[0]
    for index in ordered[1:]:
        if index != last + 1:
            yield first, last
            first = index
        last = index
    yield first, last


def _read_runs(data: bytes) -> Iterator[tuple[int, int]]:
    """(first, last) of each run; (-1, -1) where the data ends in the middle of one."""
    at, end = 1, 0
    while at < len(data):
        skipped, at = varint(data, at)
        more, at = varint(data, at) if at else (0, 0)
        if not at:
            yield -1, -1
            return
        yield end + skipped, end + skipped + more
        end += skipped + more + 1


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf's at `at`, and where it ends; 0 if there is none of at most five bytes."""
    number = 0
    for place, byte in enumerate(data[at : at + 5]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    return number, 0


def _put_varint(data: bytearray, number: int) -> None:
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)


def most_set_bytes(below: int) -> int:
    """No set of indexes below `below` takes more bytes."""
    return 1 + -(-below // 8)
