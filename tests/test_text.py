import pytest

from perfladder.text import clause, near_names, plural


def test_a_near_name_is_suggested_whatever_its_case():
    assert near_names("UNET", ["unet", "vae"], "modules") == "Did you mean 'unet'? Known modules: unet, vae."


def test_a_far_name_only_gets_the_list():
    assert near_names("x", ["unet", "vae"], "modules") == "Known modules: unet, vae."


def test_a_long_list_is_cut_and_counted():
    assert near_names("x", [f"layer{i}" for i in range(5)], "modules", limit=2).endswith("layer0, layer1, and 3 more.")


def test_no_names_at_all():
    assert near_names("x", [], "modules") == "There are no modules."


def test_plural():
    assert (plural(1, "run"), plural(2, "run")) == ("1 run", "2 runs")


@pytest.mark.parametrize("sentence", ["It failed", "It failed.", "It failed.\n", ValueError("It failed.")])
def test_a_message_in_another_sentence_leaves_the_full_stop_to_that(sentence):
    assert f"Not done: {clause(sentence)}. Try again." == "Not done: It failed. Try again."
