"""AdaSpec: engine-free core of the speculative-decoding runtime (never imports SGLang)."""
