"""Small checkouts with the argument files of slime, SGLang and Megatron-LM in their real places and forms."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

FILES = {
    "slime/utils/arguments.py": """
        import argparse
        import a_package_that_is_not_installed

        def get_slime_extra_args_provider(add_custom_arguments=None):
            def add_slime_arguments(parser):
                parser.add_argument("--rollout-batch-size", type=int, required=True)
                parser.add_argument("--num-rollout", type=int)
                parser.add_argument("--newest-of-slime", choices=["a", "b"])
                if "--lr" not in parser._option_string_actions:
                    parser.add_argument("--lr", type=float)
                return parser
            return add_slime_arguments

        def _pre_parse_mode() -> "a_package_that_is_not_installed.Mode":
            parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            parser.add_argument("--debug-train-only", action="store_true")
            return parser.parse_known_args()[0]
        """,
    "slime/backends/sglang_utils/arguments.py": """
        import argparse
        from sglang.srt.server_args import ServerArgs
        from sglang_router.launch_router import RouterArgs

        def sglang_parse_args():
            parser = argparse.ArgumentParser(add_help=False)
            parser.add_argument("--sglang-router-ip")
            RouterArgs.add_cli_args(parser, use_router_prefix=True)
            original = parser.add_argument
            def renamed(*names, **options):
                if "--tp-size" not in names:
                    original(*[f"--sglang-{name.lstrip('-')}" for name in names], **options)
            parser.add_argument = renamed
            ServerArgs.add_cli_args(parser)
            return parser.parse_known_args()[0]
        """,
}
SGLANG = {
    "sglang/__init__.py": "print('a package may print when it is imported'); __version__ = '9.9'",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": """
        class ServerArgs:
            @staticmethod
            def add_cli_args(parser):
                parser.add_argument("--tp-size", type=int)
                parser.add_argument("--newest-of-sglang", type=float)
        """,
}
ROUTER = {
    "sglang_router/__init__.py": "__version__ = '8.8'",
    "sglang_router/launch_router.py": """
        class RouterArgs:
            @staticmethod
            def add_cli_args(parser, use_router_prefix=False):
                parser.add_argument("--router-newest" if use_router_prefix else "--newest", action="append")
        """,
}
MEGATRON = {
    "megatron/training/arguments.py": """
        import argparse
        import enum

        Kind = enum.Enum("Kind", ["flash", "local"])

        def parse_args(extra_args_provider=None, ignore_unknown_args=False):
            parser = argparse.ArgumentParser(allow_abbrev=False)
            parser.add_argument("--lr", type=float)
            parser.add_argument("--newest-of-megatron", nargs="+", type=int)
            parser.add_argument("--kind", type=lambda name: Kind[name], choices=list(Kind))
            return extra_args_provider(parser).parse_known_args()[0]
        """,
}
NEVER_IMPORTED = {"megatron/training/arguments.py": "import time\ntime.sleep(600)"}


def write_checkout(folder: Path, *parts: dict[str, str]) -> Path:
    """Write the files into a folder and return it."""
    for part in parts:
        for name, text in part.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text))
    return folder
