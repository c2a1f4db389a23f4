"""Starting servers and putting load on them: used by `adaspec serve`, `adaspec bench` and tests."""
