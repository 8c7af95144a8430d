from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import RequestError, StartupError
from service.target.text import TargetTokenizer, TextStream
from tests.support.tiny_target import END_TOKEN_ID, write_tiny_target


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TargetTokenizer:
    return TargetTokenizer(write_tiny_target(tmp_path_factory.mktemp("target")))


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_streamed_pieces_join_to_the_whole_text(tokenizer: TargetTokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokenizer.encode(text))


def test_half_a_character_is_held_back_until_it_is_whole(tokenizer: TargetTokenizer) -> None:
    stream = TextStream(tokenizer)
    assert [stream.push(token_id) for token_id in tokenizer.encode("a€")] == ["a", "", "", "€"]
    for token_id in tokenizer.encode("€")[:2]:
        assert stream.push(token_id) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_no_text_and_end_tokens_are_known(tokenizer: TargetTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("<|im_start|>x<|im_end|>")) == "x"
    assert tokenizer.end_token_ids == {END_TOKEN_ID}


def test_a_chat_is_rendered_up_to_the_answer(tokenizer: TargetTokenizer) -> None:
    assert (
        tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_folder_without_template_or_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        TargetTokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="not a tokenizer"):
        TargetTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match="cannot be read"):
        TargetTokenizer(tmp_path)
