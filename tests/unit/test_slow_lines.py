"""`wire.slow`: a second codec for what crosses a boundary, from peers whose lines are slow."""

from __future__ import annotations

import pytest

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.manifest.codec_names import named_by
from swarmnet.manifest.schema import Averaging, Manifest, Numerics, Wire
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import Fetched, Gradient, Packed, Process
from swarmnet.peer.replica import answer_check_of, crossing_bytes, input_check_of
from swarmnet.testing.virtual_engine import SimulatedWindows
from swarmnet.transport import layout_of
from swarmnet.wire.codecs import encoded_bytes

FLOATS = Manifest(numerics=Numerics(mode="fp32"), averaging=Averaging(sync="local", codec="int8"))
RUN = FLOATS.model_copy(update={"wire": Wire(activations="bf16", slow="int8", slow_mbit=20.0)})
SHAPE = (4, 64, 128)


def test_a_line_is_slow_once_it_is_measured_to_be() -> None:
    wire = RUN.wire
    assert not wire.is_slow(0), "nobody has measured it"
    assert wire.is_slow(2_499_999) and not wire.is_slow(2_500_000)
    assert not Wire().is_slow(1)


def test_all_who_read_codecs_know_of_it() -> None:
    assert RUN.wire.codecs == ("bf16", "fp32", "int8") == RunTerms.of(RUN).boundary_codecs
    assert ("wire.slow", "codec", "int8") in named_by(RUN)
    assert crossing_bytes(RUN, 1, 10**6) == pytest.approx(crossing_bytes(RUN, 1, 10**8) * 2.032 / 6)


def packed(codec: str, shape: tuple[int, ...] = SHAPE) -> Packed:
    return Packed(codec, shape, bytes(encoded_bytes(codec, shape)))


@pytest.mark.parametrize(
    ("run", "taken"), [(RUN, {"bf16", "int8"}), (FLOATS, {"fp32"})], ids=["with a codec for slow lines", "without"]
)
@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_an_activation_comes_in_either_codec_and_in_no_third(run: Manifest, taken: set[str], purpose: str) -> None:
    windows = SimulatedWindows(8)
    check, request = input_check_of(run, 1, windows), Process(0, 1, 0, purpose=purpose)
    proof = (windows.layout,) if purpose == "train" else ()
    for codec in taken:
        check.declared(request, (*layout_of((packed("int32", (4, 65)), packed(codec))), *proof))
    for codec in {"fp32", "bf16", "fp16", "int8", "nf4"} - taken:
        with pytest.raises(BadMessage) as caught:
            check.declared(request, (*layout_of((packed("int32", (4, 65)), packed(codec))), *proof))
        assert caught.value.code is RejectCode.BAD_SHAPE
    with pytest.raises(BadMessage):
        check.declared(request, (("int8", (4, 65)), ("int8", SHAPE), *proof))


def test_so_does_a_gradient() -> None:
    check, tokens = answer_check_of(RUN, 1), 4 * 64
    for codec in ("fp32", "int8"):
        check(Process(0, 1, 0), Gradient(1.0, tokens, 0.0, (packed(codec),)))
        check.remembered(Fetched((packed(codec),), 1.0, tokens))
    for stage, codec in ((1, "bf16"), (0, "int8")):
        with pytest.raises(BadMessage):
            answer_check_of(RUN, stage)(Process(0, stage, 0), Gradient(1.0, tokens, 0.0, (packed(codec),)))
