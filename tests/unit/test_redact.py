"""No value of a secret gets through, however it is cut, escaped or split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalworker.contract.jsonio import dumps
from evalworker.redact import Redactor, Stream, secret_variable, secrets_of, secrets_of_file

SECRET = "sk-test-0123456789abcdef"


def test_a_value_is_replaced_by_its_name() -> None:
    redactor = Redactor({"OPENAI_API_KEY": SECRET})
    assert (
        redactor.text(f"Bearer {SECRET}, twice {SECRET}")
        == "Bearer [redacted OPENAI_API_KEY], twice [redacted OPENAI_API_KEY]"
    )
    assert redactor.find(f"x{SECRET}y") == "OPENAI_API_KEY"
    assert redactor.find("nothing") is None
    assert redactor.find_in({"a": [1, None, {SECRET: True}]}) == "OPENAI_API_KEY"


def test_short_values_stay() -> None:
    redactor = Redactor({"AWS_SECRET_ACCESS_KEY": "test", "EMPTY_TOKEN": ""})
    assert redactor.text("a test") == "a test"


def test_the_longer_of_two_values_wins() -> None:
    redactor = Redactor({"A_KEY": SECRET, "B_KEY": SECRET + "-longer"})
    assert redactor.text(SECRET + "-longer") == "[redacted B_KEY]"


@pytest.mark.parametrize("length", range(8, len(SECRET)))
def test_a_value_that_was_cut_at_the_end_of_a_text_goes_too(length: int) -> None:
    redactor = Redactor({"A_KEY": SECRET})
    assert redactor.text("said " + SECRET[:length]) == "said [redacted A_KEY]"
    assert redactor.text("said " + SECRET[:length] + "…") == "said [redacted A_KEY]"


def test_values_that_json_writes_with_escapes() -> None:
    secret = 'pass"word\\with\nénough'
    redactor = Redactor({"A_PASSWORD": secret})
    line = dumps({"error": f"refused: {secret}!"})
    assert json.loads(redactor.text(line)) == {"error": "refused: [redacted A_PASSWORD]!"}


def test_json_values_are_redacted_inside() -> None:
    redactor = Redactor({"A_KEY": SECRET})
    assert redactor.json({"a": [SECRET, 1, None], "b": {"c": f"<{SECRET}>"}}) == {
        "a": ["[redacted A_KEY]", 1, None],
        "b": {"c": "<[redacted A_KEY]>"},
    }


@given(st.lists(st.sampled_from([SECRET, "sk-", "sk-test", "x", "é", "\n"])), st.integers(1, 9))
def test_a_stream_gives_what_the_whole_gives(parts: list[str], size: int) -> None:
    redactor = Redactor({"A_KEY": SECRET})
    data = "".join(parts).encode()
    stream = Stream(redactor)
    out = b"".join(stream.feed(data[start : start + size]) for start in range(0, len(data), size)) + stream.end()
    assert SECRET.encode() not in out
    assert out.decode() == data.decode().replace(SECRET, "[redacted A_KEY]")


@given(st.binary(max_size=200), st.integers(1, 50))
def test_a_stream_passes_other_bytes_on_as_they_are(data: bytes, size: int) -> None:
    stream = Stream(Redactor({"A_KEY": SECRET}))
    out = b"".join(stream.feed(data[start : start + size]) for start in range(0, len(data), size)) + stream.end()
    assert out == data


def test_which_variables_are_secrets() -> None:
    environment = {
        "OPENAI_API_KEY": "a",
        "MY_SERVICE_KEY": "b",
        "PATH": "c",
        "GH_TOKEN": "d",
        "SPECIAL": "e",
        "EMPTY_TOKEN": "",
    }
    assert set(secrets_of(environment, ["SPECIAL"])) == {"OPENAI_API_KEY", "MY_SERVICE_KEY", "GH_TOKEN", "SPECIAL"}
    assert not secret_variable("INSPECT_EVAL_MAX_TOKENS")


def test_which_lines_of_a_dotenv_are_secrets() -> None:
    values = {
        "OPENAI_API_KEY": "short-one",
        "ODD_NAME": "a1b2c3d4e5f6a7b8c9",
        "INSPECT_EVAL_MODEL": "openai-gpt-4o-2024-08-06",
        "S3_BUCKET_NAME": "inspect-fleet-logs-123456",
        "AWS_PROFILE": "research-profile-2026",
        "MODEL_BASE_URL": "https-something-1234567",
        "GREETING": "hello there, what a long text 1",
        "NOTHING": None,
    }
    assert set(secrets_of_file(values)) == {"OPENAI_API_KEY", "ODD_NAME"}
