"""Code that goes on for ever, and code that prints what it should not."""

from __future__ import annotations

from typing import Final

from disturbance import FORGED_FRAMES, Disturbance, cut, ended, stopped, timed_out, timed_out_after

LOOPS: Final = (
    Disturbance(
        "loop",
        """
print('a', flush=True)
while True: pass
""",
        timed_out_after("a\n"),
        0.5,
    ),
    Disturbance(
        "loop-in-c",
        """
print('a', flush=True)
sum(range(10**12))
""",
        timed_out_after("a\n"),
        0.5,
    ),
    Disturbance("loop-in-a-number", "10 ** 10 ** 10", timed_out),
    Disturbance(
        "loop-in-a-pattern",
        """
import re
re.match('(a*)*b', 'a' * 40)
""",
        timed_out,
    ),
    Disturbance(
        "sleep",
        """
import time
time.sleep(99)
""",
        timed_out,
    ),
    Disturbance(
        "wait-for-input",
        """
import os
os.read(os.pipe()[0], 1)
""",
        timed_out,
    ),
    Disturbance(
        "loop-with-all-signals-blocked",
        """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
while True: pass
""",
        timed_out,
    ),
    Disturbance(
        "loop-with-all-signals-ignored",
        """
import signal
for s in set(signal.Signals) - {9, 19}:
    signal.signal(s, signal.SIG_IGN)
while True: pass
""",
        timed_out,
    ),
    Disturbance(
        "loop-that-catches-everything",
        """
while True:
    try:
        while True: pass
    except: pass
""",
        timed_out,
    ),
    Disturbance(
        "thread-that-never-ends",
        """
import threading, time
threading.Thread(target=time.sleep, args=(99,)).start()
""",
        timed_out,
    ),
    Disturbance(
        "threads-that-spin-after-the-end",
        """
import threading
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin).start()
""",
        timed_out,
    ),
    Disturbance(
        "exit-handler-that-never-ends",
        """
import atexit, time
atexit.register(time.sleep, 99)
""",
        timed_out,
    ),
    Disturbance(
        "loop-in-del",
        """
class A:
    def __del__(self):
        while True: pass
A()
""",
        timed_out,
    ),
    Disturbance(
        "stopped-by-itself",
        """
import os
os.kill(os.getpid(), 19)
""",
        timed_out,
    ),
    Disturbance(
        "output-that-pretends-to-be-in-time",
        """
print('x' * 100, flush=True)
while True: print(end='', flush=True)
""",
        timed_out,
    ),
    Disturbance(
        "closed-output",
        """
import os
os.close(1); os.close(2)
while True: pass
""",
        timed_out,
    ),
    Disturbance(
        "nice-and-slow",
        """
import os, time
os.nice(19)
while True: time.sleep(0)
""",
        lambda r: timed_out(r) or r.exit_code == 1,
    ),
    Disturbance(
        "stdout-without-an-end",
        """
import sys
class A:
    def write(self, _):
        while True: pass
    flush = write
sys.stdout = A()
print('a')
""",
        timed_out,
    ),
    Disturbance(
        "forged-start-and-loop",
        FORGED_FRAMES
        + """
import time
while True:
    for handle in range(3, 64):
        for frame in frames:
            try: os.write(handle, frame)
            except OSError: pass
    time.sleep(0.01)
""",
        stopped,
    ),
    Disturbance(
        "message-that-loops",
        """
class A(Exception):
    def __str__(self):
        while True: pass
raise A
""",
        timed_out,
    ),
)

OUTPUTS: Final = (
    Disturbance("endless-stdout", "while True: print('x' * 1000)", cut),
    Disturbance(
        "endless-stderr",
        """
import sys
while True: sys.stderr.write('x' * 1000)
""",
        cut,
    ),
    Disturbance(
        "endless-line",
        """
import sys
while True: sys.stdout.write('x')
""",
        lambda r: timed_out(r) or cut(r),
        0.3,
    ),
    Disturbance(
        "endless-bytes",
        """
import os
while True: os.write(1, bytes(range(256)) * 256)
""",
        cut,
    ),
    Disturbance("one-huge-line", "print('x' * 10**8)", cut),
    Disturbance(
        "invalid-text",
        """
import os
_ = os.write(1, b'\\xff\\xfe\\xc3')
""",
        ended(stdout="\ufffd\ufffd\ufffd"),
    ),
    Disturbance("zero-bytes", "print('\\0' * 3)", ended(stdout="\0\0\0\n")),
    Disturbance("lone-surrogates", "print('\\ud800')", ended(stdout="\\ud800\n")),
    Disturbance(
        "words-of-a-timeout",
        """
print('TimeoutError: killed by time limit of 30 s')
import sys
sys.stderr.write('Killed')
raise TimeoutError('time limit')
""",
        ended(1),
    ),
    Disturbance("terminal-codes", "print('\\x1b[2J\\r\\x1b]0;x\\7')", ended(stdout="\x1b[2J\r\x1b]0;x\x07\n")),
    Disturbance(
        "output-after-nonblocking",
        """
import os
os.set_blocking(1, False)
os.set_blocking(2, False)
print('a')
""",
        ended(stdout="a\n"),
    ),
    Disturbance(
        "printed-by-many-threads",
        """
import threading
[threading.Thread(target=print, args=('x' * 9,)).start() for _ in range(9)]
""",
        ended(),
    ),
)
