"""One speculative step: draft a block, verify a prefix of it, commit, feed the drafter's context."""
