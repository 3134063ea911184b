"""A file that an earlier version wrote is refused in one line that has the key of today."""

import pytest

from swarmnet.config.check import RENAMED, check
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Manifest


@pytest.mark.parametrize(
    ("model", "table", "key"), [(Manifest, "training", "max_void"), (PeerConfig, "caps", "memo_bytes")]
)
def test_an_old_key_is_answered_with_the_new_one(
    model: type[Manifest] | type[PeerConfig], table: str, key: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check(model, {table: {key: 1}}, origin=lambda _: "run.toml")
    assert str(refused.value) == f"run.toml: {table}.{key}: unknown key; it is called {RENAMED[key]} now"
    # And that key is one.
    name = RENAMED[key].removeprefix(f"{table}.")
    assert name in model.model_fields[table].annotation.model_fields


def test_every_key_that_was_renamed_is_tried() -> None:
    assert sorted(RENAMED) == ["max_void", "memo_bytes"]
