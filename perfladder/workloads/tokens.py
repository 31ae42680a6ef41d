"""A working CLIP tokenizer made in code: it knows every byte, and common prompt words are one token each."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

MAX_NUM_TOKENS = 77
BOS_TOKEN = "<|startoftext|>"
EOS_TOKEN = "<|endoftext|>"

_END_OF_WORD = "</w>"
_PROMPT_WORDS = (
    "a an the of in on at and with by to over under near from night day dusk dawn morning evening sunset sunrise "
    "light lighthouse house sea ocean wave waves storm sky cloud clouds rain snow forest tree mountain river lake "
    "city street road bridge castle garden flower cat dog horse bird fox astronaut robot portrait woman man child "
    "photo photograph painting oil watercolor sketch drawing digital art style detailed highly realistic cinematic "
    "lighting soft dramatic red green blue yellow white black gold silver old ancient modern small large tiny quality "
    "high low blurry"
)

Pair = tuple[str, str]


def learn_merges(words: list[str]) -> list[Pair]:
    """Learn byte-pair merges, most frequent pair first, until each word is one token that ends in `</w>`."""
    spellings = [[*word[:-1], word[-1] + _END_OF_WORD] for word in words]
    merges: list[Pair] = []
    while pairs := Counter(pair for spelling in spellings for pair in pairwise(spelling)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spellings = [_merge(spelling, best) for spelling in spellings]
    return merges


def _merge(spelling: list[str], pair: Pair) -> list[str]:
    """Join each occurrence of a pair in a spelling, from left to right."""
    merged: list[str] = []
    for symbol in spelling:
        # A symbol that was just joined is longer than the first of the pair, so it cannot be joined twice.
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def build_tokenizer(vocab_size: int | None = None) -> CLIPTokenizer:
    """Make the tokenizer; prompts pad to 77 tokens with the end token, as in Stable Diffusion.

    Args:
        vocab_size: Rows of the text encoder's embedding. The start and end token get its last two ids, as in CLIP
            (49406 and 49407); ids between the learned tokens and these two stay unused. None: as many rows as needed.
    """
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(_PROMPT_WORDS.split())
    tokens = [*alphabet, *(byte + _END_OF_WORD for byte in alphabet), *dict.fromkeys(a + b for a, b in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    end = len(vocabulary) + 2 if vocab_size is None else vocab_size
    assert end >= len(vocabulary) + 2
    vocabulary |= {BOS_TOKEN: end - 2, EOS_TOKEN: end - 1}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_NUM_TOKENS)
