"""``python -m bench.index_memory``: what cache_aware's index takes, after a million prompts, of the memory allowed.

The process's resident memory, as the operating system counts it, less what it had before the first prompt. The exit
code is 1 when that is more than ``--max-tree-size`` and a tenth.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from extproc.policies.cache_options import CacheAwareSettings
from extproc.policies.prefix_index import PrefixIndex
from extproc.policies.prompt_chain import Cuts, PromptChain
from extproc.workers.worker import Role, Worker, WorkerUrl

_WORKERS: Final = 16
_INSTRUCTIONS: Final = 100  # beginnings that many prompts have in common
_SHOWN: Final = 10  # lines of the table
_TTL: Final = 180.0
_MOST: Final = 1.1


def main() -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="bench.index_memory", description="What cache_aware's index takes.")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--max-tree-size", type=int, default=CacheAwareSettings().max_tree_size)
    parser.add_argument("--hash", action="store_true", help="--cache-index hash")
    options = parser.parse_args()
    cuts = Cuts()
    if options.hash:
        index = PrefixIndex(options.max_tree_size, cuts, ttl=_TTL, most_holders=3)
    else:
        index = PrefixIndex(options.max_tree_size, cuts)
    workers = [Worker(f"p{number}", WorkerUrl("http", f"p{number}", 1), Role.PREFILL) for number in range(_WORKERS)]
    rng = random.Random(1)
    instructions = [rng.randbytes(2000) for _ in range(_INSTRUCTIONS)]
    before, began, most = _resident(), time.process_time(), 0.0
    print("| prompts | beginnings known | reckoned | resident | CPU |\n|---|---|---|---|---|")
    for number in range(1, options.prompts + 1):
        prompt = rng.choice(instructions) + rng.randbytes(rng.randrange(200, 3000))
        index.add(PromptChain(prompt, cuts, "m"), rng.choice(workers), number / 1000)
        if number % (options.prompts // _SHOWN) == 0:
            taken = _resident() - before
            most = max(most, taken)
            spent = time.process_time() - began
            print(
                f"| {number} | {len(index)} | {index.size / 2**20:.1f} MiB | {taken / 2**20:.1f} MiB | {spent:.0f} s |"
            )
    return int(most > _MOST * options.max_tree_size)


def _resident() -> int:
    """Bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
