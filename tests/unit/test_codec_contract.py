"""The laws of `wire.codec_contract` can be broken: each of these codecs is honest but for one thing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import Phase, settings

from swarmnet.wire import codec_contract, codecs
from swarmnet.wire.codec import memory
from swarmnet.wire.codec_casts import CASTS

FP32 = next(codec for codec in CASTS if codec.name == "fp32")


class Honest:
    """fp32 under another name."""

    name = reduced = "acme.fp32"

    def __getattr__(self, name):
        return getattr(FP32, name)


class Imprecise(Honest):
    def encode(self, x_N):
        return FP32.encode(x_N * 0.5)


class Longer(Honest):
    """Writes more bytes than it declares."""

    def encode(self, x_N):
        return torch.cat((memory(FP32.encode(x_N)), torch.zeros(12, dtype=torch.uint8)))


class Vague(Honest):
    """Promises nothing about its errors."""

    def bound(self, x_N):
        return torch.full(x_N.shape, float("inf"), dtype=torch.float64)


class Fickle(Vague):
    def __init__(self):
        self.counter = itertools.count()

    def encode(self, x_N):
        return FP32.encode(x_N * 0 + next(self.counter))


class Whole(Vague):
    """Says that each element is by itself, and subtracts the mean of all."""

    def encode(self, x_N):
        return FP32.encode(x_N - x_N.mean())


class Careless(Honest):
    def encode(self, x_N):
        return FP32.encode(x_N.nan_to_num(0.0, 0.0, 0.0))


class Trusting(Honest):
    def check(self, data, num_elements):
        pass


class Partial(Honest):
    """Raises something else where bytes are not to its liking."""

    def decode(self, data, out_N):
        if data.numel() and int(data[0]) % 2:
            raise IndexError("no such code")
        FP32.decode(data, out_N)


def test_an_honest_codec_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs._used, "acme.fp32", Honest())
    codec_contract.check_codec("acme.fp32")


@pytest.fixture
def first_example_will_do():
    """Do not look for the smallest one, but long enough: draws depend on constants of all modules imported so far."""
    before = settings.get_current_profile_name()
    settings.register_profile("unshrunk", settings(), phases=[Phase.generate], max_examples=1000)
    settings.load_profile("unshrunk")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("first_example_will_do")
@pytest.mark.parametrize(
    ("codec", "law"),
    [
        (Imprecise, codec_contract.errors_stay_within_the_bound),
        (Longer, codec_contract.errors_stay_within_the_bound),
        (Fickle, codec_contract.equal_input_gives_equal_bytes),
        (Fickle, codec_contract.threads_change_no_bit),
        (Whole, codec_contract.pieces_decode_as_the_whole),
        (Careless, codec_contract.what_is_not_finite_is_refused),
        (Trusting, codec_contract.any_bytes_decode_or_are_refused),
        (Partial, codec_contract.any_bytes_decode_or_are_refused),
    ],
    ids=lambda each: each.__name__,
)
def test_a_codec_that_breaks_a_law_is_found_out(codec, law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs._used, "acme.fp32", codec())
    with pytest.raises((AssertionError, IndexError)):
        law("acme.fp32")
