"""The `adaspec` console command."""
