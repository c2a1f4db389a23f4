"""One speculative step: draft a block, verify a prefix, commit it, feed the drafter's context."""
