"""Code whose error can hardly be shown, and code that is hardly code."""

from __future__ import annotations

from typing import Final

from disturbance import Disturbance, cut, ended, survived

ERRORS: Final = (
    Disturbance(
        "deep-recursion",
        """
def f(): f()
f()
""",
        ended(1, "", "RecursionError"),
    ),
    Disturbance("huge-message", "raise ValueError('x' * 10**8)", cut),
    Disturbance(
        "message-that-raises",
        """
class A(Exception):
    def __str__(self): raise ValueError
    __repr__ = __str__
raise A
""",
        ended(1),
    ),
    Disturbance(
        "message-that-prints",
        """
class A(Exception):
    def __str__(self):
        print('b')
        return 'c'
raise A
""",
        ended(1),
    ),
    Disturbance(
        "message-that-exits",
        """
import sys
class A(Exception):
    def __str__(self): sys.exit(0)
raise A
""",
        survived,
    ),
    Disturbance(
        "replaced-hook",
        """
import sys
sys.excepthook = lambda *a: print('b')
1 / 0
""",
        ended(1, "b\n"),
    ),
    Disturbance(
        "hook-that-raises",
        """
import sys
sys.excepthook = lambda *a: 1 / 0
1 / 0
""",
        ended(1),
    ),
    Disturbance(
        "hook-that-is-gone",
        """
import sys
del sys.excepthook
1 / 0
""",
        ended(1),
    ),
    Disturbance(
        "cycle-of-causes",
        """
a, b = ValueError('a'), ValueError('b')
a.__cause__, b.__cause__ = b, a
raise a
""",
        ended(1, "", "ValueError"),
    ),
    Disturbance(
        "long-chain",
        """
e = None
for i in range(2000):
    n = ValueError(i)
    n.__context__ = e
    e = n
raise e
""",
        ended(1),
    ),
    Disturbance(
        "group-of-groups",
        """
e = ValueError()
for _ in range(5000): e = ExceptionGroup('a', [e])
raise e
""",
        ended(1),
    ),
    Disturbance("not-an-exception", "raise 5", ended(1, "", "TypeError")),
    Disturbance("keyboard-interrupt", "raise KeyboardInterrupt", survived),
    Disturbance("exit-from-a-generator", "raise GeneratorExit", ended(1)),
    Disturbance(
        "error-from-a-thread",
        """
import threading
threading.Thread(target=lambda: 1 / 0).start()
""",
        ended(0, "", "ZeroDivisionError"),
    ),
    Disturbance(
        "value-that-can-not-be-shown",
        """
class A:
    def __repr__(self): raise ValueError('no')
A()
""",
        ended(1, "", "ValueError"),
    ),
    Disturbance(
        "value-of-endless-length",
        """
class A:
    def __repr__(self): return 'x' * 10**8
A()
""",
        cut,
    ),
    Disturbance(
        "value-that-is-no-text",
        """
class A:
    def __repr__(self): return 5
A()
""",
        ended(1, "", "TypeError"),
    ),
)

CODES: Final = (
    Disturbance("empty", "", ended(stdout="")),
    Disturbance("zero-byte-in-the-code", "print(1)\0print(2)", ended(1, "")),
    Disturbance("surrogate-in-the-code", "print('\ud800')", survived),
    Disturbance("byte-order-mark", "\ufeffprint(1)", survived),
    Disturbance("other-encoding", "# -*- coding: latin-1 -*-\nprint('\u00e9')", ended(stdout="\u00e9\n")),
    Disturbance("unknown-encoding", "# -*- coding: nonsense -*-\nprint(1)", survived),
    Disturbance("carriage-returns", "print(1)\r\nprint(2)\rprint(3)", ended(stdout="1\n2\n3\n")),
    Disturbance("ten-megabytes", "x = '" + "x" * 10_000_000 + "'\nprint(len(x))", ended(stdout="10000000\n")),
    Disturbance("deep-parentheses", "(" * 100_000 + ")" * 100_000, survived),
    Disturbance("deep-operators", "x = " + "-" * 100_000 + "1", survived),
    Disturbance("deep-attributes", "x" + ".a" * 100_000, survived),
    Disturbance("deep-blocks", "".join(" " * i + "if 1:\n" for i in range(200)) + " " * 200 + "pass", ended(1, "")),
    Disturbance("many-lines", "pass\n" * 50_000, survived),
    Disturbance("wide-expression", "+".join("1" for _ in range(100_000)), survived),
    Disturbance("huge-constant", "x = 'a' * 10**9 * 10", survived),
    Disturbance("await-outside", "await x", ended(1, "", "SyntaxError")),
    Disturbance("only-a-comment", "# nothing", ended(stdout="")),
    Disturbance(
        "future-annotations",
        """
from __future__ import annotations
x: nothing = 1
x
""",
        ended(stdout="1\n"),
    ),
)
