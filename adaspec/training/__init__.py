"""Offline initialisation of a drafter from a target model's own trajectories."""
