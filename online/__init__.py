"""Background learner: turns verification feedback into better drafter weights."""
