"""The tokenizer of a job, which is loaded once however many threads ask for it first."""

import subprocess
import sys

from strands_rollout.engine import SHIPPED_MODEL_DIR

ASK_AT_ONCE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer, vocab_size_of

ready = threading.Barrier(8)

def ask(number):
    ready.wait()
    if number % 2:
        return vocab_size_of(SimpleNamespace(hf_checkpoint=sys.argv[1]))
    return id(load_tokenizer(sys.argv[1]))

with ThreadPoolExecutor(8) as threads:
    print(len(set(threads.map(ask, range(8)))))
"""


def test_load_tokenizer_loads_once_for_concurrent_threads() -> None:
    """In a process that has not imported transformers, which several threads can't do at once."""
    command = [sys.executable, "-c", ASK_AT_ONCE, str(SHIPPED_MODEL_DIR)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
