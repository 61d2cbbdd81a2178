"""The protobuf codec: bytes that the official messages have, and bytes that no message has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.service.batches import dense
from penstock.store.wire import decode, decode_head, encode

# written by the protobuf package from the SDK's own messages
REQUEST = bytes.fromhex(
    "0a09533a747261696e3a3010071a93010a100a0e0a0c01000000020000002c010000125f0a0d7461726765745f746f6b656e73124e"
    "12460a1004000000000000000500000000000000122000000000000000000100000000000000020000000000000002000000000000"
    "001a1000000000000000000100000000000000180222020302121e0a077765696768747312130a0c0000003f000080bf0000004018"
    "01220103220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e03f30013a1f0a12636c69705f6c6f"
    "775f7468726573686f6c64120909000000000000e03f"
)
OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f726412440a086c6f6770726f627312360a086c6f6770726f6273122a0a0c0000803f0000004000004040"
    "1218000000000000000004000000000000000c00000000000000180118021a130a086c6f73733a73756d11000000000000f83f"
)


def test_a_request_of_the_official_client_is_read() -> None:
    request = decode("ForwardBackwardRequest", REQUEST)
    assert (request["model_id"], request["seq_id"]) == ("S:train:0", 7)
    assert (request["loss_fn"], request["forward_only"]) == ("ppo", True)
    assert request["loss_fn_config"] == {"clip_low_threshold": 0.5}
    assert request["loss_fn_config_v2"] == {"clip_low_threshold": {"number": 0.5}}
    [datum] = request["data"]
    tokens = datum["model_input"][0]["encoded_text"]["tokens"]
    assert np.frombuffer(tokens, "<i4").tolist() == [1, 2, 300]
    inputs = datum["loss_fn_inputs"]
    assert dense(inputs["weights"], "weights").tolist() == [0.5, -1.0, 2.0]
    assert dense(inputs["target_tokens"], "targets").tolist() == [[4, 0], [0, 5], [0, 0]]
    assert decode_head("ForwardBackwardRequest", REQUEST)["seq_id"] == 7


def test_an_answer_has_the_bytes_of_the_official_message() -> None:
    tensor = {
        "data": np.array([1, 2, 3], "<f4").tobytes(),
        "offsets": np.array([0, 4, 12], "<i8").tobytes(),
        "dtype": 1,
    }
    record = {"type_tag": "logprobs", "fields": {"logprobs": tensor}, "num_datums": 2}
    message = {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [record],
        "metrics": {"loss:sum": 1.5},
    }
    assert encode("ForwardBackwardOutput", message) == OUTPUT
    assert decode("ForwardBackwardOutput", OUTPUT) == message


@pytest.mark.parametrize("cut", [5, 20, 60, len(REQUEST) - 1])
def test_a_cut_request_is_refused(cut: int) -> None:
    with pytest.raises(UserError, match="no ForwardBackwardRequest"):
        decode("ForwardBackwardRequest", REQUEST[:cut])


def test_a_number_in_the_place_of_a_text_is_no_text() -> None:
    """It was as many zeros: ten bytes of a client took all memory."""
    assert decode_head("ForwardBackwardRequest", b"\x08\x05\x10\x07") == {"seq_id": 7}


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for read in (decode, decode_head):
        try:
            read("ForwardBackwardRequest", data)
        except UserError:
            continue


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.lists(st.integers(-9, 1 << 40)))
def test_numbers_come_back(seq: int, shape: list[int]) -> None:
    assert decode("ForwardBackwardRequest", encode("ForwardBackwardRequest", {"seq_id": seq})) == {
        "seq_id": seq
    }
    if shape:
        assert decode("Tensor", encode("Tensor", {"shape": shape})) == {"shape": shape}
