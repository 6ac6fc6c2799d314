#!/usr/bin/env bash
# What only a GPU can show, the most valuable first: tools/gpu/run.sh RESULTS [STEP ...]
#
# A step writes RESULTS/STEP.json (the laws: .xml); one that has written it is not run again, so a machine that is lent for minutes
# at a time gets through all of them. RESULTS/steps.txt says of each step what became of it: passed, failed, out of time, or not run,
# and RESULTS/log what it printed. LIMIT: seconds a step may take (480).
#
# Needs Python 3.10 or newer with torch for CUDA and transformers; nothing is downloaded. A package that is missing is taken from the
# folder WHEELS (.whl): of the dependencies of the core, images for PyTorch usually lack cachetools and the two of pydantic (3 MB).
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
results=$(realpath -m "${1:?say where the results go: tools/gpu/run.sh RESULTS [STEP ...]}")
shift
limit=${LIMIT:-480}
wheels=${WHEELS:-.whl}
python=${PYTHON:-python3}
mkdir -p "$results"
export PYTHONPATH=$PWD:$PWD/lab:$PWD/src:$PWD/tests HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if ! "$python" -c 'import cachetools, pydantic_settings' 2>/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --target "$site" "$wheels"/*.whl || exit 1
    PYTHONPATH+=:$site
fi

steps=(check first_token batches kernel laws)

# A step by its name; its figures go to the file that is given.
run() {
    case $1 in
    check) "$python" -m benchmarks.gpu_check --json "$2" ;;
    # A 7B shape: up to 16k tokens from host memory, alone ...
    first_token)
        "$python" -m benchmarks.ttft --device cuda --contexts 16384 8192 4096 --rounds 7 --naive-rounds 2 --no-memory --json "$2"
        ;;
    # ... and eight at a time, their chunks in the GPU's memory.
    batches)
        "$python" -m benchmarks.ttft --device cuda --contexts 8192 --queries 128 --batches 8 --rounds 5 --naive-rounds 1 \
            --no-memory --json "$2"
        ;;
    kernel) "$python" -m benchmarks.deferred_kernel --json "$2" ;;
    # Settings of pytest that need its plugins are left out, and what runs in an interpreter of the kernel, which `kernel` runs itself.
    laws)
        "$python" -m pytest -q -c /dev/null --rootdir . --import-mode importlib -p no:cacheprovider -p tools.gpu.on_gpu \
            --junit-xml "$2" tests/test_equivalence.py tests/test_equivalence_recompute.py tests/test_equivalence_policies.py \
            tests/test_deferred.py
        ;;
    *)
        echo "there is no step $1; there are ${steps[*]}" >&2
        return 64
        ;;
    esac
}

outcome() {
    case $1 in
    0) echo passed ;;
    2) echo "not run: there is no CUDA device" ;;
    124 | 137) echo "out of time after $limit s" ;;
    *) echo "failed with status $1" ;;
    esac
}

export -f run
export python
failed=0
for step in "${@:-${steps[@]}}"; do
    file=$results/$step.json
    [ "$step" = laws ] && file=$results/laws.xml
    if [ -e "$file" ]; then
        said="passed before"
    else
        echo "=== $step" | tee -a "$results/log"
        started=$SECONDS
        timeout --kill-after 10 "$limit" bash -c 'steps="$3"; run "$1" "$2"' _ "$step" "$file.part" "${steps[*]}" 2>&1 | tee -a "$results/log"
        status=${PIPESTATUS[0]}
        [ "$status" = 0 ] && mv "$file.part" "$file"
        [ "$status" = 0 ] || failed=1
        said="$(outcome "$status"), $((SECONDS - started)) s"
    fi
    printf '%-12s %s\n' "$step" "$said" | tee -a "$results/steps.txt"
done
exit "$failed"
