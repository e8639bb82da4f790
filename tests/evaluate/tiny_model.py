"""A model folder as Hugging Face writes them: four layers, random weights, a word a token."""

from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lmcache_kvcmas.evaluate.workload import Context, Workload

WORDS = 120
LAYERS = 4
_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"


def write_tiny_model(folder: Path) -> None:
    names = ["<unk>", "<system>", "<user>", "<assistant>", *(f"w{i}" for i in range(WORDS))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def text(seed: int, words: int) -> str:
    random = Random(seed)
    return " ".join(f"w{random.randrange(WORDS)}" for _ in range(words))


ROLES = {"solver": text(101, 20), "critic": text(102, 31)}
INSTRUCTIONS = {"solver": " " + text(103, 6), "critic": " " + text(104, 8)}
SEEN = Context("t0", False, text(1, 90))
NEW = Context("t1", False, text(2, 80))
TWIN = Context("a0", True, SEEN.text)
"""An anchor of the very text that is tested."""
SHORT = Context("a1", True, text(3, 40))
LONG = Context("a2", True, text(4, 100))
LONGER = Context("a3", True, text(5, 110))
WORKLOAD = Workload(ROLES, INSTRUCTIONS, (TWIN, SHORT, LONG, LONGER, SEEN, NEW))
