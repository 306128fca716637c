"""Attacks that talk to somebody: over the network, over unix sockets, over any other kind of socket."""

from functools import partial
from typing import Final

from attack import Attack
from host_view import Sight
from signs import holds_socket
from victims import Caller, HandleCatcher, Server

_NEEDS_RIGHTS: Final = "only root may open it, or a container may not, or the kernel has none"
_SOCKETS: Final = {
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "ping": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)",
    "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "netlink-events": "socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)",
    "vsock": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "crypto": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "bluetooth": "socket.socket(31, socket.SOCK_RAW)",
    "ipv6": "socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
    "multipath": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
    "datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
}
_ALWAYS: Final = ("netlink", "datagrams")
_SEND: Final = {
    "tcp": "socket.create_connection(TARGET['address'], 3)",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', tuple(TARGET['address']))",
    "path": "socket.socket(socket.AF_UNIX).connect(TARGET['address'])",
    "abstract": "socket.socket(socket.AF_UNIX).connect(TARGET['address'])",
}

ALL: Final = (
    *(
        Attack(f"connect-{family}", _SEND[family], partial(Server, family=family))
        for family in ("tcp", "path", "abstract")
    ),
    Attack("send-udp", _SEND["udp"], partial(Server, family="udp", kind="dgram")),
    Attack(
        "connect-tcp-with-the-first-packet",
        "socket.socket().sendto(b'x', 0x20000000, tuple(TARGET['address']))",
        partial(Server, family="tcp"),
    ),
    *(
        Attack(
            f"send-{family}-datagram",
            "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', TARGET['address'])",
            partial(Server, family=family, kind="dgram"),
        )
        for family in ("path", "abstract")
    ),
    *(
        Attack(
            f"send-{family}-datagram-from-a-pair",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', TARGET['address'])",
            partial(Server, family=family, kind="dgram"),
        )
        for family in ("path", "abstract")
    ),
    Attack(
        "connect-a-pair-elsewhere",
        "s = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]\ns.connect(TARGET['address'])\ns.send(b'x')",
        partial(Server, family="abstract", kind="dgram"),
    ),
    Attack(
        "send-a-handle",
        """
sender, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.connect(TARGET["address"])
socket.send_fds(sender, [b"x"], [os.open("/dev/null", os.O_RDONLY)])
""",
        HandleCatcher,
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
    Attack("listen", "s = socket.create_server(tuple(TARGET['address']))\nhold()", Caller),
    Attack(
        "listen-without-binding",
        "be_known()\ns = socket.socket()\ns.listen()\nhold()",
        partial(Sight, shows=holds_socket),
    ),
    *(
        Attack(
            f"open-socket-{name}",
            f"be_known()\nopened = {code}\nhold()",
            partial(Sight, shows=holds_socket),
            seldom_on_plain="" if name in _ALWAYS else _NEEDS_RIGHTS,
        )
        for name, code in _SOCKETS.items()
    ),
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
