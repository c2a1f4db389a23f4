"""The only package that imports SGLang: plugin entry points, worker, CPU platform and hooks."""
