"""Environments of other libraries (an extra for each library), played unchanged; a search tool; QA rewards."""
