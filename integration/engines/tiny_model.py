"""Make a tiny random Llama, a byte-level BPE tokenizer and a chat template. Usage: tiny_model.py DIRECTORY"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = {"eos_token": END, "pad_token": END_OF_TEXT, "additional_special_tokens": [START]}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer trained on the texts that every machine has: Python's own library."""
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train([str(text) for text in texts if text.stat().st_size < 400_000], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **SPECIAL,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model(eos: int) -> LlamaForCausalLM:
    """A model of random weights; logits are peaked, so that greedy decoding is stable."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).float()
    for weights in made.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.08)
    return made


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    made = tokenizer()
    made.save_pretrained(directory)
    model(made.convert_tokens_to_ids(END)).save_pretrained(directory)
