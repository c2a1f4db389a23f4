"""Bad input at every boundary: what a target is, how valid input is bent, who drives it."""
