"""`load_tokenizer`: loads a tokenizer once, also for concurrent threads."""

import subprocess
import sys

from strands_rollout.engine import SHIPPED_MODEL_DIR

LOAD_CONCURRENTLY = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer, vocab_size_of

ready = threading.Barrier(8)

def load(number):
    ready.wait()
    if number % 2:
        return vocab_size_of(SimpleNamespace(hf_checkpoint=sys.argv[1]))
    return id(load_tokenizer(sys.argv[1]))

with ThreadPoolExecutor(8) as threads:
    print(len(set(threads.map(load, range(8)))))
"""


def test_load_tokenizer_loads_once_for_concurrent_threads() -> None:
    """The threads also import transformers for the first time, and this import is not thread-safe."""
    command = [sys.executable, "-c", LOAD_CONCURRENTLY, str(SHIPPED_MODEL_DIR)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
