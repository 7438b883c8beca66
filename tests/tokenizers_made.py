"""Real tokenizers of all kinds that models have, trained here on a few lines, in directories as models have them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again; isn't it odd?",
    "Ünïcödé — naïve café, Ελληνικά, русский текст, 日本語の文章, 한국어, العربية, हिन्दी 🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "def f(x):\n    return {'a': [x, 1.5e-3]}  # two  spaces\n\n\ttab",
    "low lower lowest new newer newest wide wider widest 0123456789 3.14159",
] * 3
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNKNOWN = "<unk>"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", UNKNOWN]
KINDS = ("byte_level", "llama", "gemma", "metaspace", "unigram", "wordpiece", "suffix", "plain")


def tokenizer(kind: str) -> Tokenizer:
    """A tokenizer of one of KINDS."""
    made: Tokenizer = _MAKERS[kind]()
    return made


def directory(path: Path, kind: str = "byte_level", *, template: str | None = CHATML, **config: object) -> Path:
    """The files of a model with such a tokenizer, in a new directory; ``config``: of its ``config.json``."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer(kind).save(str(path / "tokenizer.json"))
    own = {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>", "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(own | ({"chat_template": template} if template else {})))
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 128, "eos_token_id": 1} | config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    return path


def _special() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in SPECIAL]


def _trained(made: Tokenizer, trainer: object) -> Tokenizer:
    made.train_from_iterator(CORPUS, trainer)
    # One that is no special token, but added: its text stays.
    made.add_tokens(
        [AddedToken("<tool>", special=False, normalized=False), AddedToken("\uff5cañadido▁\uff5c", special=False)]
    )
    return made


def _byte_level() -> Tokenizer:
    """As Llama 3, Qwen, GPT-2."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=_special(), initial_alphabet=alphabet, show_progress=False
    )
    _trained(made, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def _bytes_as_tokens() -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN, fuse_unk=True))
    bytes_ = [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*_special(), *bytes_],
        limit_alphabet=40,
        initial_alphabet=["▁"],
        show_progress=False,
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    _trained(made, trainer)
    # The bytes are of the vocabulary, not added to it.
    told = json.loads(made.to_str())
    told["added_tokens"] = [token for token in told["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(told))


def _llama() -> Tokenizer:
    """As Llama 2, Mistral."""
    made = _bytes_as_tokens()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def _gemma() -> Tokenizer:
    made = _bytes_as_tokens()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return _trained(made, trainers.BpeTrainer(vocab_size=500, special_tokens=_special(), show_progress=False))


def _unigram() -> Tokenizer:
    """As T5, XLM-R."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=_special(), unk_token=UNKNOWN, show_progress=False)
    return _trained(made, trainer)


def _wordpiece() -> Tokenizer:
    """As BERT."""
    made = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _trained(made, trainers.WordPieceTrainer(vocab_size=500, special_tokens=_special(), show_progress=False))


def _suffix() -> Tokenizer:
    """As GPT-1: the end of a word is marked, so that a token looks otherwise as the last one."""
    made = Tokenizer(models.BPE(unk_token=UNKNOWN, end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=_special(), end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(made, trainer)


def _plain() -> Tokenizer:
    """Without a decoder: words with a space between."""
    made = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(made, trainers.WordLevelTrainer(vocab_size=300, special_tokens=_special(), show_progress=False))


_MAKERS = {
    "byte_level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "suffix": _suffix,
    "plain": _plain,
}
