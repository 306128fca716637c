"""Attacks over the network, unix sockets, and sockets of any other family."""

from functools import partial
from typing import Final

from attack import Attack
from host_view import ObservedProcesses
from signs import holds_socket
from victims import Server

_CONNECT_UNIX: Final = "socket.socket(socket.AF_UNIX).connect(TARGET['address'])"

# TCP connections without the calls that Landlock checks
_OTHER_WAYS: Final = {
    "by-sendto": "socket.socket().sendto(b'x', socket.MSG_FASTOPEN, tuple(TARGET['address']))",
    "by-sendmsg": "socket.socket().sendmsg([b'x'], [], socket.MSG_FASTOPEN, tuple(TARGET['address']))",
    "by-sendmmsg": """
host, port = TARGET["address"]
name = ctypes.create_string_buffer(struct.pack("=H", 2) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8))
text = ctypes.create_string_buffer(b"x")
piece = ctypes.create_string_buffer(struct.pack("PN", ctypes.addressof(text), 1))
message = struct.pack("PIxxxxPNPNiI", ctypes.addressof(name), 16, ctypes.addressof(piece), 1, 0, 0, 0, 0)
messages = ctypes.create_string_buffer(message + bytes(16))
line = socket.socket()
checked(libc.sendmmsg(line.fileno(), messages, 1, socket.MSG_FASTOPEN))
""",
    "over-several-paths": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).connect(tuple(TARGET['address']))",
}

ALL: Final = (
    *(Attack(f"connect-tcp-{name}", code, partial(Server, family="tcp")) for name, code in _OTHER_WAYS.items()),
    Attack("connect-tcp", "socket.create_connection(TARGET['address'], 3)", partial(Server, family="tcp")),
    Attack(
        "send-udp",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', tuple(TARGET['address']))",
        partial(Server, family="udp", kind="dgram"),
    ),
    *(Attack(f"connect-{family}", _CONNECT_UNIX, partial(Server, family=family)) for family in ("path", "abstract")),
    *(
        Attack(
            f"send-{family}-datagram-from-a-pair",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', TARGET['address'])",
            partial(Server, family=family, kind="dgram"),
        )
        for family in ("path", "abstract")
    ),
    Attack(
        "send-through-every-handle",
        """
for handle in range(3, 256):
    try:
        libc.sendto(handle, b"x", 1, 0x40, struct.pack("H", 1) + TARGET["address"].encode(), 2 + len(TARGET["address"]))
        socket.socket(fileno=os.dup(handle)).connect(TARGET["address"])
    except OSError:
        pass
""",
        partial(Server, family="abstract", kind="dgram"),
        skip_on_plain="it has only the handles of its output",
    ),
    Attack(
        "listen", "take_name()\ns = socket.socket()\ns.listen()\nhold()", partial(ObservedProcesses, sign=holds_socket)
    ),
    Attack(
        "open-socket-of-any-family",
        """
take_name()
kept = []
for family in set(range(2, 46)):
    for kind in (1, 2, 3, 5):
        try:
            kept.append(socket.socket(family, kind))
        except OSError:
            pass
assert kept
hold()
""",
        partial(ObservedProcesses, sign=holds_socket),
    ),
    Attack(
        "open-pair-of-any-family",
        """
take_name()
kept = []
pair = (ctypes.c_int * 2)()
for family in set(range(2, 46)):
    for kind in (1, 2, 5):
        if libc.socketpair(family, kind, 0, pair) == 0:
            kept.append(tuple(pair))
assert kept
hold()
""",
        partial(ObservedProcesses, sign=holds_socket),
        may_fail_on_plain="it needs the kernel's TIPC",
    ),
)
