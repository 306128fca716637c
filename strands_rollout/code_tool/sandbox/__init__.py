"""The sandbox's own processes: supervisor, fork server and the confined children that run code.

Imports the standard library and itself only: nothing else of the package is loaded where model-written code runs.
"""
