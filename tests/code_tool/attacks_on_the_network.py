"""Attacks that talk to somebody: over the network, over unix sockets, over any other kind of socket."""

from functools import partial
from typing import Final

from attack import Attack
from host_view import Sight
from signs import holds_socket
from victims import Server

_CONNECT_UNIX: Final = "socket.socket(socket.AF_UNIX).connect(TARGET['address'])"

ALL: Final = (
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
        never_on_plain="it has no handles but those of its output",
    ),
    Attack("listen", "be_known()\ns = socket.socket()\ns.listen()\nhold()", partial(Sight, shows=holds_socket)),
    Attack(
        "open-socket-of-any-family",
        """
be_known()
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
        partial(Sight, shows=holds_socket),
    ),
    Attack(
        "open-pair-of-any-family",
        """
be_known()
kept = []
pair = (ctypes.c_int * 2)()
for family in set(range(2, 46)):
    for kind in (1, 2, 5):
        if libc.socketpair(family, kind, 0, pair) == 0:
            kept.append(tuple(pair))
assert kept
hold()
""",
        partial(Sight, shows=holds_socket),
        seldom_on_plain="it needs the kernel's TIPC",
    ),
)
