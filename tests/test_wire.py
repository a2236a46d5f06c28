"""What hosts tell each other arrives as it was sent, and nothing that arrives is run."""

import collections
import pathlib
import pickle

import msgpack
import numpy as np
import pytest
from stand_in import make_config, make_groups
from test_intervention import Run

from rti_jax import batching, wire
from rti_jax.roles import RoleUsage
from rti_jax.types import Status

VALUES = [
    None,
    (1, 2, (3.5, None), [True, ()], "half a pair \ud800", b"bytes"),
    {"a": {1: (2,)}, (3, 4): "key"},
    10**300,
    2**64 - 1,
    float("inf"),
    range(1, 9, 2),
    pathlib.Path("runs/a"),
    Status.SUCCESS,
    RoleUsage(1, 2, 3, 0.5),
    np.float32(2.5),
]


@pytest.mark.parametrize("value", VALUES, ids=[type(v).__name__ for v in VALUES])
def test_values_arrive_as_they_were(value):
    found = wire.decode(wire.encode(value))
    assert found == value and type(found) is type(value)


def test_what_json_takes_arrives_as_its_plain_type():
    class Text(str):
        pass

    sent = [collections.OrderedDict(role=Text("user")), collections.Counter("aab")]
    found = wire.decode(wire.encode(sent))
    assert found == [{"role": "user"}, {"a": 2, "b": 1}]
    assert [type(v) for v in (*found, found[0]["role"])] == [dict, dict, str]


def test_groups_with_corrections_and_arrays_do():
    groups = make_groups()
    assert wire.decode(wire.encode(groups)) == groups
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    found = wire.decode(wire.encode([array]))[0]
    assert found.dtype == array.dtype and (found == array).all()
    found[0, 0] = 7  # its own memory


def test_what_hosts_collect_after_a_step_does():
    run = Run()
    sent = ([run()], run.roles.pop_usage(), [batching.build(make_groups(), make_config()).outline])
    assert sent[0][0].attempts and repr(wire.decode(wire.encode(sent))) == repr(sent)  # by its text: NaN is not itself


@pytest.mark.parametrize("value", [object(), len, ValueError("x"), {1, 2}, np.array([object()])])
def test_what_is_no_data_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot be told to another host"):
        wire.encode(value)


def record(name, fields):
    return msgpack.packb(msgpack.ExtType(wire.RECORD, msgpack.packb([name, fields])))


@pytest.mark.parametrize(
    "data",
    [
        record("subprocess:Popen", {"args": ["touch", "x"]}),
        record("os:system", {"command": "x"}),
        record("rti_jax.reproduce:subprocess.run", {"args": "x"}),
        record("rti_jax.runs:os", {}),
        record("rti_jax.seeds:derive_seed", {}),
        record("rti_jax.nowhere:Nothing", {}),
        record("rti_jax.types:Turn", {"id": "x"}),
        msgpack.packb(msgpack.ExtType(99, b"\xc0")),
        msgpack.packb(msgpack.ExtType(wire.ARRAY, msgpack.packb(["O", [1], b"\0" * 8]))),
        pickle.dumps(print),
        b"\xc1",
        b"",
    ],
)
def test_what_arrives_is_data_or_an_error(data, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError):
        wire.decode(data)
