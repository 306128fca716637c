"""Attacks on other runs of the same executor: parallel, earlier and later runs."""

from typing import Final

from attack import Attack
from victims import EarlierRuns, LaterRun, ParallelRun

_OWN_INTERPRETER: Final = "each run has its own interpreter"
_NO_PTRACE: Final = "Yama, or a container without CAP_SYS_PTRACE, keeps processes from each other's memory"

# Reads memory through a pipe, without /proc: writing unreadable memory to a pipe only fails.
SEARCH_OWN_MEMORY: Final = """
wanted = re.compile(rb"secret-[0-9a-f]{32}")
found, been = set(), set()
page, chunk = 4096, 65536
reader, writer = os.pipe()

def read(address, size):
    written = libc.write(writer, ctypes.c_void_p(address), number(size))
    return os.read(reader, written) if written > 0 else b""

def search(address):
    data = read(address, chunk)
    if len(data) < chunk:
        data = b"".join(read(address + i, page) or b"-" for i in range(0, chunk, page))
    found.update(wanted.findall(data + read(address + chunk, 64)))
    return len(data) >= page

def search_from(address, step):
    here, gaps = address - address % chunk, 0
    while gaps < 40 and here not in been:
        been.add(here)
        gaps = 0 if search(here) else gaps + 1
        here += step

libc.sbrk.restype = ctypes.c_void_p
inside = [id(sys.modules), id({}), id("a" * 600), ctypes.addressof(ctypes.create_string_buffer(300_000))]
inside += [ctypes.cast(f, ctypes.c_void_p).value for f in (libc.getpid, ctypes.pythonapi.PyList_New)]
for address in [libc.sbrk(number(0)), *inside]:
    search_from(address, chunk)
    search_from(address - chunk, -chunk)
print(found)
"""
_SEARCH_OTHER_MEMORY: Final = """
for line in open(f"/proc/{TARGET['pid']}/maps"):
    if "rw" in line:
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        with open(f"/proc/{TARGET['pid']}/mem", "rb", buffering=0) as memory:
            memory.seek(start)
            print(set(re.findall(rb"secret-[0-9a-f]{32}", memory.read(end - start))))
"""
_ON_PARALLEL_RUN: Final = {
    "read-files": "print(open(TARGET['path']).read())",
    "list-files": "print(os.listdir(TARGET['folder']))\nopen(TARGET['folder'] + '/foreign', 'w').close()",
    "change-files": "open(TARGET['path'], 'w').write('mine')",
    "kill": "os.kill(TARGET['pid'], 9)",
    "write-its-output": "open(f\"/proc/{TARGET['pid']}/fd/1\", 'w').write('mine')",
    "search-its-memory": _SEARCH_OTHER_MEMORY,
    "search-own-memory": SEARCH_OWN_MEMORY,
}
_SKIP_ON_PLAIN: Final = {"search-own-memory": _OWN_INTERPRETER}
_MAY_FAIL_ON_PLAIN: Final = {"search-its-memory": _NO_PTRACE, "write-its-output": _NO_PTRACE}
_SEARCH_FILES: Final = """
import glob
for folder in (".", "..", os.environ["HOME"], os.environ.get("TMPDIR", ".")):
    for path in glob.glob(folder + "/answer.txt") + glob.glob(folder + "/*/answer.txt"):
        print(open(path).read())
"""

ALL: Final = (
    *(
        Attack(
            f"parallel-run-{name}",
            code,
            ParallelRun,
            _SKIP_ON_PLAIN.get(name, ""),
            _MAY_FAIL_ON_PLAIN.get(name, ""),
            timeout_s=10,
        )
        for name, code in _ON_PARALLEL_RUN.items()
    ),
    *(
        Attack(f"earlier-runs-{name}", code, EarlierRuns, skip_on_plain=reason, timeout_s=10)
        for name, code, reason in (
            ("search-memory", SEARCH_OWN_MEMORY, _OWN_INTERPRETER),
            ("search-files", _SEARCH_FILES, "it deletes the files of a run at its end"),
        )
    ),
    Attack(
        "poison-later-runs",
        """
import builtins, random, warnings
import numpy, sympy
poison = TARGET["name"]
os.environ["POISON"] = poison
sys.path.append(poison)
sys.argv.append(poison)
sys.modules["poison"] = poison
warnings.filterwarnings("ignore", poison)
numpy.set_printoptions(nanstr=poison)
for place in (builtins, json, os, random, sys, warnings, numpy, sympy, sympy.Symbol, sympy.core.add):
    place.poison = poison
sympy.Symbol.__repr__ = lambda self: poison
json.dumps = lambda *args: poison
for name in ("usercustomize.py", "sitecustomize.py", ".pythonrc", poison + ".pth", "sympy.py", "numpy.py", poison):
    for folder in (".", os.environ["HOME"], os.environ["HOME"] + "/.local/lib/python3/site-packages"):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "w") as file:
            file.write(f"print({poison!r})")
builtins.print = lambda *args: os.write(1, poison.encode())
""",
        LaterRun,
        skip_on_plain=_OWN_INTERPRETER,
    ),
)
