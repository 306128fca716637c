"""Judges the flags of a launch command as slime, Megatron-LM, SGLang and its router would read them.

slime parses with `parse_known_args` everywhere: a misspelled flag is dropped without a word. This package finds it. It
imports none of the four; their parsers are asked in a child process, or known from a recorded list.
"""
