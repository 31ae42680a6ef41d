"""Guessed inputs, and no option that a call would refuse."""

from perfladder.initializing.guess import guesses
from perfladder.workloads import language


def test_generate_is_given_token_ids_and_a_short_length_only():
    model = language.build()
    (inputs,) = guesses(model, [], {}, {})
    assert inputs == {"inputs": {"$tensor": [1, 16], "dtype": "int64", "fill": "zeros"}, "max_new_tokens": 16}
