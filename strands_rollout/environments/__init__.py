"""Environments of other libraries, played unchanged: a module for each library, which is an extra of this package."""
