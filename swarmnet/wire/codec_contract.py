"""What every float codec must do, as laws that hypothesis tries to break: for the tests of codec authors.

    from swarmnet.wire.codec_contract import check_codec

    def test_ternary() -> None:
        check_codec("acme.ternary")

Our own codecs are held to the same laws. Needs hypothesis, which only tests have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from hypothesis.extra import numpy as hnp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("swarmnet.wire.codec_contract needs hypothesis: pip install hypothesis") from error

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire import codecs


def check_codec(name: str) -> None:
    """Hold the codec of that name to all `LAWS`.

    Raises: AssertionError with the smallest example that breaks a law; UsageError if there is no such codec.
    """
    codecs.use(name)
    for law in LAWS:
        law(name)


def errors_stay_within_the_bound(name: str) -> None:
    """A decoded tensor is fp32, of the same shape, and as close as `bound` says. Sizes are as declared."""

    def law(x: Tensor) -> None:
        packed = codecs.encode(name, x)
        shortest, longest = codecs.encoded_sizes(name, x.shape)
        assert shortest <= packed.num_bytes <= longest
        y = codecs.decode(packed)
        assert y.dtype == torch.float32 and y.shape == x.shape and y.is_contiguous()
        assert bool(((y.double() - x.double()).abs() <= codecs.use(name).bound(x)).all())

    _for_all(name, law)


def equal_input_gives_equal_bytes(name: str) -> None:
    """The bytes depend on the numbers alone: not on dtype, layout, graph or how often it is asked."""

    def law(x: Tensor) -> None:
        plain = bytes(codecs.encode(name, x.clone()).data)
        # The same numbers with gaps between them.
        spread = torch.stack((x, -x), dim=1)[:, 0]
        for same in (x, spread, x.double(), x.clone().requires_grad_()):
            assert bytes(codecs.encode(name, same).data) == plain

    _for_all(name, law)


def threads_change_no_bit(name: str) -> None:
    """Encoding and decoding give the same bits with one thread and with three."""
    x = torch.randn(3 * (1 << 18) + 77, generator=torch.Generator().manual_seed(1))
    before, results = torch.get_num_threads(), set()
    try:
        # Three does not divide what is split, so pieces end elsewhere.
        for threads in (1, 3):
            torch.set_num_threads(threads)
            packed = codecs.encode(name, x)
            results.add((bytes(packed.data), codecs.decode(packed).numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


def pieces_decode_as_the_whole(name: str) -> None:
    """A piece that begins at a multiple of `block` decodes to what that piece of the whole does."""
    block = codecs.use(name).block
    x = torch.randn(2 * block + 33, generator=torch.Generator().manual_seed(2))
    pieces = [codecs.decode(codecs.encode(name, piece)) for piece in (x[:block], x[block:])]
    assert torch.equal(torch.cat(pieces), codecs.decode(codecs.encode(name, x)))


def what_is_not_finite_is_refused(name: str) -> None:
    """Encoding a NaN or an infinity raises BadMessage(NON_FINITE), wherever it stands."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        # At both ends, and on both sides of where a block may end.
        for place in (0, 255, 256, 299):
            x = torch.ones(300)
            x[place] = bad
            assert _refuses(functools.partial(codecs.encode, name, x), RejectCode.NON_FINITE), (
                f"encodes {bad}, at {place}"
            )


def any_bytes_decode_or_are_refused(name: str) -> None:
    """Decoders are total: any bytes give finite numbers or BadMessage. `check` says which."""

    @settings(deadline=None)
    @given(x=_vectors(name), data=st.data())
    def law(x: Tensor, data: st.DataObject) -> None:
        shortest, longest = codecs.encoded_sizes(name, x.shape)
        # Nearly right bytes find more than random ones.
        blob = data.draw(_altered(bytes(codecs.encode(name, x).data)) | st.binary(min_size=shortest, max_size=longest))
        packed = Packed(name, (x.numel(),), blob)

        def check() -> None:
            codecs.check_packed(packed)
            codecs.find(name).check(np.frombuffer(blob, np.uint8), x.numel())

        refused = _refuses(check)
        assert _refuses(lambda: codecs.decode(packed)) == refused, "`check` and `decode` disagree"
        assert refused or bool(torch.isfinite(codecs.decode(packed)).all())

    law()


LAWS: tuple[Callable[[str], None], ...] = (
    errors_stay_within_the_bound,
    equal_input_gives_equal_bytes,
    threads_change_no_bit,
    pieces_decode_as_the_whole,
    what_is_not_finite_is_refused,
    any_bytes_decode_or_are_refused,
)


def _refuses(attempt: Callable[[], object], code: RejectCode | None = None) -> bool:
    """Does it raise BadMessage, with that code if one is given? Any other error passes."""
    try:
        attempt()
    except BadMessage as refusal:
        return code in (None, refusal.code)
    return False


def _for_all(name: str, law: Callable[[Tensor], None]) -> None:
    settings(deadline=None)(given(x=_vectors(name))(law))()


def _vectors(name: str) -> st.SearchStrategy[Tensor]:
    """fp32 vectors: often a repeated fill with a few odd elements, as activations with outliers are. Sizes around those
    where blocks begin and end."""
    edge = min(codecs.find(name).block, 1024)
    sizes = st.sampled_from([0, 1, max(edge - 1, 0), edge, edge + 1, 1000]) | st.integers(0, 600)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return sizes.flatmap(lambda n: hnp.arrays("float32", n, elements=finite, fill=finite)).map(torch.from_numpy)


@st.composite
def _altered(draw: st.DrawFn, blob: bytes) -> bytes:
    """An encoding of which some bytes are other ones, or some at the end are missing."""
    changed = bytearray(blob)
    for place in draw(st.lists(st.integers(0, max(len(blob) - 1, 0)), max_size=3)) if blob else ():
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed[: len(changed) - draw(st.integers(0, 2))])
