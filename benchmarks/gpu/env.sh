# source env.sh KEEP_DIR: run this tree on the unpacked stack.
export PYTHONPATH="$PWD:$1/site${PYTHONPATH:+:$PYTHONPATH}"
export ADASPEC_SMOLLM2="$1/smollm2.gguf" ADASPEC_CACHE="$1/cache"
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 benchmarks/gpu/register.py "$PWD" "$1/site"
