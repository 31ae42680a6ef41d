import pytest

from perfladder.workloads.tokens import BOS_TOKEN, EOS_TOKEN, build_tokenizer, learn_merges

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_merges_are_learned_most_frequent_pair_first():
    assert learn_merges(["aab", "ab"]) == [("a", "b</w>"), ("a", "ab</w>")]


@pytest.mark.parametrize("text", ["a lighthouse at dusk", "zebra über ☂ 日本", "tab\tand  spaces"])
def test_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(text.split())


def test_known_words_are_one_token_and_unknown_words_several(tokenizer):
    assert len(tokenizer("lighthouse dusk").input_ids) == 2 + 2
    assert len(tokenizer("xylophone").input_ids) > 1 + 2


def test_no_byte_is_unknown(tokenizer):
    ids = tokenizer("☂ é Ж").input_ids
    assert tokenizer.eos_token_id not in ids[:-1]


def test_prompts_pad_to_77_with_the_end_token(tokenizer):
    ids = tokenizer("a cat", padding="max_length", truncation=True).input_ids
    assert len(ids) == 77
    assert ids[0] == tokenizer.convert_tokens_to_ids(BOS_TOKEN)
    assert set(ids[3:]) == {tokenizer.convert_tokens_to_ids(EOS_TOKEN)} == {tokenizer.pad_token_id}


def test_long_prompt_is_cut_to_77_and_ends(tokenizer):
    ids = tokenizer("cat " * 200, padding="max_length", truncation=True).input_ids
    assert len(ids) == 77
    assert ids[-1] == tokenizer.eos_token_id


def test_given_vocabulary_size_places_the_special_tokens_last():
    tokenizer = build_tokenizer(49408)
    assert tokenizer("cat").input_ids[0] == tokenizer.bos_token_id == 49406
    assert tokenizer("cat").input_ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id == 49407
