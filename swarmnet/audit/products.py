"""What vectors weigh against one that nobody could foresee, and whether contributions add up to their sum. Pure.

Of integers a product is a number modulo `messages.PRIME`, and equal or not (`sums.linear`). Sums of floats round, so
there each vector has several products in real numbers, its `Sketch`: those of contributions add up to those of their
sum as far as rounding lets them. One vector would not do. A lie of a thousand times the tolerance passes one product
for one sum in hundreds, and a reducer can try thousands of lies until one does; all seven pass for one in 10^15.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.messages import PRIME, Pledge

PRODUCTS = 7
"""Of a sketch: with the length as many fp32 numbers as fill a digest's place in a pledge."""

ROUNDING = 2.0**-24
"""Of a sum of two fp32 numbers, at most, as a part of it."""

CERTAIN = 16.0
"""How many times the length of an error its product may be. The vector's entries have a mean square of 1, so one time
is usual, and sixteen, of an error in many directions, is never seen."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Of a float vector: products with `PRODUCTS` drawn vectors, and its length. slack: how far it may be, in length,
    from what it stands for, where its codec rounds."""

    products: tuple[float, ...]
    length: float
    slack: float = 0.0

    @property
    def packed(self) -> bytes:
        """32 bytes, in fp32: what is pledged."""
        return struct.pack(f"<{PRODUCTS + 1}f", *(_fp32(number) for number in (*self.products, self.length)))

    @classmethod
    def of(cls, packed: bytes) -> Sketch:
        """What somebody has pledged, whatever that is."""
        *products, length = struct.unpack(f"<{PRODUCTS + 1}f", packed)
        return cls(tuple(products), length)

    def near(self, other: Sketch, terms: int, lengths: float) -> bool:
        """May both be of one sum, made in two orders of so many terms, which have these lengths together?"""
        most = self._most(terms, lengths)
        # What is not finite is near nothing.
        return most < math.inf and all(
            abs(one - its) <= most for one, its in zip(self.products, other.products, strict=True)
        )

    def reaches(self, least: float, terms: int, lengths: Sequence[float]) -> bool:
        """Is what it stands for at least as long, but for rounding?"""
        return self.length + self._most(terms, sum(lengths)) >= least

    def as_long(self, other: Sketch, terms: int, lengths: float) -> bool:
        """The same of their lengths."""
        return abs(self.length - other.length) <= self._most(terms, lengths)

    def _most(self, terms: int, lengths: float) -> float:
        return CERTAIN * (ROUNDING * (terms + 2) * lengths + self.slack)


Product = int | Sketch


def stated(pledge: Pledge, *, exact: bool) -> Product:
    """What its contribution weighs, as it says."""
    return pledge.product if exact else Sketch.of(pledge.sum_root)


def together(pieces: Sequence[Product]) -> Product:
    """What a vector weighs of which these are the pieces."""
    sketches = [piece for piece in pieces if isinstance(piece, Sketch)]
    if not sketches:
        return sum(piece for piece in pieces if isinstance(piece, int)) % PRIME
    return _added(sketches)


def add_up(contributions: Sequence[Product], total: Product) -> bool:
    """Is that a sum of these contributions?"""
    if not isinstance(total, Sketch):
        return together(contributions) == total
    sketches = [each for each in contributions if isinstance(each, Sketch)]
    lengths = [abs(each.length) for each in sketches]
    # Who states a length that it has not would have more borne. No sum is shorter than its longest part without the
    # others.
    least = 2 * max(lengths, default=0.0) - sum(lengths)
    return total.near(_added(sketches), len(sketches), sum(lengths)) and total.reaches(least, len(sketches), lengths)


def same(stated: Product, found: Product, terms: int = 1, lengths: float = 0.0) -> bool:
    """Are both of one contribution? terms, lengths: how many gradients that is a sum of, and their lengths together,
    where it was made twice. What is stated of its length says how much rounding may do to the sum."""
    if not (isinstance(stated, Sketch) and isinstance(found, Sketch)):
        return stated == found
    lengths = max(lengths, found.length)
    return found.near(stated, terms, lengths) and found.as_long(stated, terms, lengths)


def _added(sketches: Sequence[Sketch]) -> Sketch:
    columns = zip(*(each.products for each in sketches), strict=True)
    return Sketch(
        tuple(map(sum, columns)) or (0.0,) * PRODUCTS,
        math.hypot(*(each.length for each in sketches)),
        math.hypot(*(each.slack for each in sketches)),
    )


def _fp32(number: float) -> float:
    """As near as fp32 comes."""
    return max(min(number, 3.0e38), -3.0e38)
