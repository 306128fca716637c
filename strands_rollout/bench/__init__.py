"""The benchmark: what an episode costs its client, beside the least it can cost and beside other ways to run it.

A scripted engine in a process of its own answers at once; each variant plays the same script in a fresh process. Every
played token is compared with the script: a variant that does less must not look fast.
"""
