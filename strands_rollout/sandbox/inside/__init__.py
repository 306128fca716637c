"""What confines sandboxed code from the inside: modules for a small helper process and for the children that it forks.

They import the standard library and each other only. Must not know the rest of the package.
"""
