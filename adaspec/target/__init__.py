"""The embedded target model: SmolLM2-135M-Instruct from a PyPI wheel."""
