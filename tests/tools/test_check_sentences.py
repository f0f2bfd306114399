"""`tools/check_sentences.py`: which sentences are too long, and what of an error message counts."""

import ast

import pytest

from tools.check_sentences import MOST_WORDS, message_of, too_long


def words(number: int) -> str:
    return " ".join(["word"] * number)


def test_a_sentence_may_have_so_many_words_and_no_more():
    assert not list(too_long("here", f"{words(MOST_WORDS)}. {words(MOST_WORDS)}."))
    (found,) = too_long("here", f"short. {words(MOST_WORDS + 1)}.")
    assert found.words == MOST_WORDS + 1


def test_items_of_a_list_are_sentences_and_code_is_one_word():
    assert not list(too_long("here", f"- {words(20)}\n- {words(20)}"))
    assert not list(too_long("here", f"{words(MOST_WORDS - 1)} `{words(40)}`"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("'a' 'b'", "ab"),
        ("f'a {b} c'", "a X c"),
        ("'a' + f'{b}'", "aX"),
        ("'a' if b else 'c'", "a"),
        ("text", "X"),
    ],
)
def test_what_is_put_into_a_message_is_one_word(code: str, message: str):
    assert message_of(ast.parse(code, mode="eval").body) == message
