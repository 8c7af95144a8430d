from __future__ import annotations

from typing import Any

import pytest

from draft_engine_client.wire import ClientHello
from service.clients import ClientTable, Connection, check_hello
from service.errors import CapacityError, FingerprintError, StateError
from service.testing import FakeDrafter
from tests.support.service import HELLO

FACTS = FakeDrafter().facts


def make_table(**changes: Any) -> ClientTable:
    options = {"server_id": "server", "lease_seconds": 60.0, "disconnect_grace_seconds": 0.5, "max_clients": 3}
    return ClientTable(**{**options, **changes})


def make_hello(**target: Any) -> ClientHello:
    return ClientHello.model_validate({**HELLO, "target": {**HELLO["target"], **target}})


def names(departures: list[Any]) -> list[tuple[str, str]]:
    return [(departure.client.client_id, departure.reason) for departure in departures]


def test_a_lease_ends_after_silence_and_is_renewed_by_every_call() -> None:
    table = make_table()
    first, second = table.register(make_hello(), 0.0), table.register(make_hello(), 1.0)
    assert first.client_id != second.client_id
    table.renew(first.client_id, None, 50.0)
    assert table.departed(60.0) == []
    assert names(table.departed(61.5)) == [(second.client_id, "lease")]
    assert table.get(second.client_id) is None
    with pytest.raises(StateError) as caught:
        table.renew(second.client_id, None, 62.0)
    assert (caught.value.code, caught.value.param, caught.value.numbers) == (
        "epoch_mismatch",
        "client_id",
        {"server_id": "server"},
    )


def test_another_server_id_is_refused_and_renews_nothing() -> None:
    table = make_table()
    client = table.register(make_hello(), 0.0)
    table.renew(client.client_id, "server", 1.0)
    with pytest.raises(StateError) as caught:
        table.renew(client.client_id, "server before the restart", 30.0)
    assert caught.value.param == "server_id"
    assert client.last_seen == 1.0


def test_too_many_clients_are_refused() -> None:
    table = make_table(max_clients=1)
    table.register(make_hello(), 0.0)
    with pytest.raises(CapacityError) as caught:
        table.register(make_hello(), 0.0)
    assert caught.value.numbers["max_clients"] == 1
    assert len(table) == 1


def test_a_client_leaves_with_its_last_kept_connection() -> None:
    table = make_table()
    one, two = Connection(), Connection()
    client = table.register(make_hello(), 0.0, one)
    table.renew(client.client_id, None, 0.0, one)
    table.renew(client.client_id, None, 0.0, two)
    one.lost()
    assert table.departed(1.0) == []
    assert table.departed(9.0) == []
    two.lost()
    two.lost()
    assert table.departed(10.0) == [], "the grace begins when the loss is seen"
    assert table.departed(10.4) == []
    assert names(table.departed(10.6)) == [(client.client_id, "disconnect")]
    assert table.departed(11.0) == []


def test_a_client_that_comes_back_stays() -> None:
    table = make_table()
    one, two = Connection(), Connection()
    client = table.register(make_hello(), 0.0, one)
    table.renew(client.client_id, None, 0.0, one)
    one.lost()
    table.departed(1.0)
    table.renew(client.client_id, None, 1.2, two)
    assert table.departed(5.0) == []
    two.lost()
    table.departed(6.0)
    assert names(table.departed(7.0)) == [(client.client_id, "disconnect")]


def test_connections_of_one_request_each_do_not_count() -> None:
    table = make_table()
    client = table.register(make_hello(), 0.0, Connection())
    for _ in range(3):
        connection = Connection()
        table.renew(client.client_id, None, 1.0, connection)
        connection.lost()
    assert table.departed(2.0) == []
    assert table.departed(20.0) == []


def test_clients_that_share_a_connection_are_told_apart() -> None:
    table = make_table()
    shared = Connection()
    kept, passing = table.register(make_hello(), 0.0, shared), table.register(make_hello(), 0.0, shared)
    table.renew(kept.client_id, None, 0.0, shared)
    shared.lost()
    table.departed(1.0)
    assert names(table.departed(2.0)) == [(kept.client_id, "disconnect")]
    assert table.get(passing.client_id) is not None


@pytest.mark.parametrize(
    ("target", "param"),
    [
        ({"vocab_size": 999}, "target.vocab_size"),
        ({"hidden_size": 5}, "target.hidden_size"),
        ({"num_layers": 2}, "target.num_layers"),
        ({"target_layer_ids": (2, 0)}, "target.target_layer_ids"),
        ({"tokenizer_hash": "other"}, "target.tokenizer_hash"),
    ],
)
def test_the_first_field_that_differs_is_named(target: dict[str, Any], param: str) -> None:
    with pytest.raises(FingerprintError) as caught:
        check_hello(make_hello(**target), FACTS, tokenizer_hash="ours")
    assert (caught.value.status, caught.value.param) == (412, param)


def test_what_one_side_does_not_know_is_not_compared() -> None:
    facts = FACTS.model_copy(update={"target_num_layers": None})
    check_hello(make_hello(num_layers=77, target_layer_ids=None, tokenizer_hash="theirs"), facts)
    check_hello(make_hello(), FACTS, tokenizer_hash="ours")


def test_a_feature_dtype_that_the_drafter_does_not_take_is_refused() -> None:
    facts = FACTS.model_copy(update={"feature_dtypes": ("float16",)})
    with pytest.raises(FingerprintError) as caught:
        check_hello(make_hello(dtype="float32"), facts)
    assert (caught.value.param, caught.value.numbers) == ("target.dtype", {"expected": "float16", "got": "float32"})
