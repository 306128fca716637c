"""Environments of other libraries, played unchanged (each an extra of this package); a search tool; QA rewards."""
