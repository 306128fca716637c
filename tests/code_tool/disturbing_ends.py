"""Code that ends in strange ways, or breaks what its end depends on."""

from __future__ import annotations

from typing import Final

from disturbance import FORGED_FRAMES, Disturbance, caught_or_over, died, ended, survived

ENDS: Final = (
    Disturbance(
        "hard-exit",
        """
import os
print('a', flush=True)
os._exit(7)
""",
        ended(7, "a\n"),
    ),
    Disturbance(
        "hard-exit-as-if-killed",
        "import os; os._exit(137)",
        ended(137, ""),
    ),
    Disturbance(
        "hard-exit-as-if-ended",
        "import os; os._exit(143)",
        ended(143, ""),
    ),
    Disturbance(
        "exit-of-a-giant-number",
        """
import sys
sys.exit(10**30)
""",
        survived,
    ),
    Disturbance(
        "exit-with-an-object",
        """
import sys
class A:
    def __str__(self): raise ValueError
sys.exit(A())
""",
        survived,
    ),
    Disturbance(
        "success-after-failure",
        """
import os
try:
    1 / 0
except ZeroDivisionError:
    os._exit(0)
""",
        ended(0, ""),
    ),
    Disturbance(
        "abort",
        "import os; os.abort()",
        died(6),
    ),
    Disturbance(
        "null-pointer",
        "import ctypes; ctypes.string_at(0)",
        died(11),
    ),
    Disturbance(
        "kill-itself",
        """
import os
os.kill(os.getpid(), 9)
""",
        died(9),
    ),
    Disturbance(
        "terminate-itself",
        """
import os
os.kill(os.getpid(), 15)
""",
        died(15),
    ),
    Disturbance(
        "alarm-itself",
        """
import signal, time
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(9)
""",
        died(14),
    ),
    Disturbance(
        "interrupt-itself",
        """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
""",
        survived,
    ),
    Disturbance(
        "stack-overflow",
        """
import sys
sys.setrecursionlimit(10**9)
def f(): f()
f()
""",
        survived,
        0.5,
    ),
    Disturbance(
        "stack-overflow-in-c",
        """
import sys
sys.setrecursionlimit(10**9)
x = []
for _ in range(2 * 10**5): x = [x]
repr(x)
""",
        survived,
    ),
    Disturbance(
        "storm-of-signals",
        """
import os, signal
signal.signal(10, lambda *_: None)
for _ in range(3000): os.kill(os.getpid(), 10)
print('a')
""",
        ended(stdout="a\n"),
    ),
    Disturbance(
        "close-everything",
        """
import os
os.closerange(0, 1000)
""",
        ended(),
    ),
    Disturbance(
        "swap-descriptors",
        """
import os
for i in range(3, 30): os.dup2(1, i)
os.dup2(2, 1)
print('a')
""",
        ended(),
    ),
    Disturbance(
        "closed-stdout",
        """
import sys
sys.stdout.close()
print('a')
""",
        ended(1),
    ),
    Disturbance(
        "detached-stdout",
        """
import sys
sys.stdout.detach()
print('a')
""",
        ended(None),
    ),
    Disturbance(
        "stdout-that-raises",
        """
import sys
class A:
    def write(self, _): raise OSError
    def flush(self): raise OSError
sys.stdout = sys.stderr = A()
print('a')
""",
        survived,
    ),
    Disturbance(
        "stdout-that-is-none",
        """
import sys
sys.stdout = sys.stderr = None
print('a')
1 / 0
""",
        survived,
    ),
    Disturbance(
        "exit-handlers-that-raise",
        """
import atexit
atexit.register(lambda: 1 / 0)
print('a')
""",
        ended(None, "a\n"),
    ),
    Disturbance(
        "no-modules",
        """
import sys
sys.modules.clear()
1 / 0
""",
        survived,
    ),
    Disturbance(
        "no-builtins",
        """
import builtins
for name in list(vars(builtins)):
    if name != 'delattr': delattr(builtins, name)
""",
        survived,
    ),
    Disturbance(
        "broken-builtins",
        """
import builtins
builtins.print = builtins.len = builtins.isinstance = builtins.repr = None
1 / 0
""",
        survived,
    ),
    Disturbance(
        "main-that-is-gone",
        """
import sys
del sys.modules['__main__']
print('a')
""",
        ended(stdout="a\n"),
    ),
    Disturbance(
        "tracing",
        """
import sys
sys.settrace(lambda *a: 1 / 0)
sys.setprofile(lambda *a: 1 / 0)
len('a')
""",
        survived,
    ),
    Disturbance(
        "fault-handler",
        """
import faulthandler, ctypes
faulthandler.enable()
ctypes.string_at(0)
""",
        died(11),
    ),
    Disturbance(
        "forged-frames",
        FORGED_FRAMES
        + """
for handle in range(3, 256):
    for frame in frames:
        try: os.write(handle, frame)
        except OSError: pass
print('a')
raise SystemExit(3)
""",
        caught_or_over,
    ),
    Disturbance(
        "forged-frames-on-stdout",
        FORGED_FRAMES
        + """
for frame in frames: os.write(1, frame)
raise SystemExit(3)
""",
        ended(3),
    ),
    Disturbance("memory-that-is-not-there", "x = bytearray(10**15)", ended(1, "", "MemoryError")),
    Disturbance(
        "memory-bit-by-bit",
        """
x = []
while True: x.append(bytearray(10**8))
""",
        survived,
    ),
)
