"""What text costs: a token through detokeniser and stop finder, a prompt through a tokenizer here and in a thread.

``python -m bench.text [DIRECTORY]``: of a model's tokenizer; without, of one of 4,096 tokens that is trained here on
this repository's documents.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from extproc.text.hf import HfTokenizer, load, quiet_libraries
from extproc.text.stops import StopFinder
from extproc.text.threads import Threads

ROUNDS: Final = 7  # the best of them counts
LENGTHS: Final = (128, 256, 512, 1024, 2048, 4096, 16384, 131072)
STOPS: Final = {
    "no stop strings": (),
    "4 stop strings": ("</s>", "\n\n\n", "User:", "###"),
    "one that often begins": ("e e e",),
}


def main(argv: Sequence[str]) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(argv[0]) if argv else _trained(Path(made))
        begun = time.perf_counter()
        tokenizer = load(directory)
        print(f"loaded in {time.perf_counter() - begun:.2f} s: {tokenizer.vocab_size} tokens")
        text = _text()
        _of_tokens(tokenizer, tokenizer.encode(text[:40_000], special=False))
        asyncio.run(_of_prompts(tokenizer, text))


def _of_tokens(tokenizer: HfTokenizer, ids: Sequence[int]) -> None:
    print(f"\nµs per token, detokeniser and stop finder together, of {len(ids)} tokens that come one by one")
    for name, stops in STOPS.items():

        def answer(stops: Sequence[str] = stops) -> None:
            detokenizer, finder = tokenizer.detokenizer(()), StopFinder(stops)
            for token in ids:
                finder.add(detokenizer.add((token,)))

        print(f"  {_best(answer) / len(ids) * 1e6:6.2f}  {name}")


async def _of_prompts(tokenizer: HfTokenizer, text: str) -> None:
    print("\nms per prompt: on the event loop, in a thread; and the longest time that the loop stood still meanwhile")
    threads = Threads(1)
    for length in LENGTHS:
        prompt = (text * (length // len(text) + 1))[:length]
        here = _best(lambda prompt=prompt: tokenizer.encode(prompt, special=True))  # type: ignore[misc]
        there, still = await _in_a_thread(threads, lambda prompt=prompt: tokenizer.encode(prompt, special=True))  # type: ignore[misc]
        print(f"  {length:7} characters  {here * 1e3:8.2f}  {there * 1e3:8.2f}  {still * 1e3:8.2f}")
    nothing, _ = await _in_a_thread(threads, lambda: None)
    print(f"  to a thread and back: {nothing * 1e3:.2f}")
    threads.stop()


async def _in_a_thread(threads: Threads, work: Callable[[], object]) -> tuple[float, float]:
    best, longest = float("inf"), 0.0
    for _ in range(ROUNDS):
        done = asyncio.Event()
        begun = last = time.perf_counter()
        threads.run(work, lambda _, done=done: done.set())  # type: ignore[misc]
        while not done.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        best = min(best, last - begun)
    return best, longest


def _best(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best


def _text() -> str:
    """This repository's documents, their paragraphs in another order, the same each time."""
    paragraphs = [
        paragraph
        for file in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
        for paragraph in file.read_text().split("\n\n")
    ]
    random.Random(0).shuffle(paragraphs)
    return "\n\n".join(paragraphs)


def _trained(directory: Path) -> Path:
    quiet_libraries()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 -- after the above

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_text()], trainer)
    made.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


if __name__ == "__main__":
    main(sys.argv[1:])
