#!/usr/bin/env bash
# Fifteen minutes on one GPU (H100 or H200), on a machine without a network. benchmarks/README.md has the whole way.
#
#   benchmarks/gpu_session.sh wheels        # beforehand, where a package index is: .whl/, about 30 MB
#   benchmarks/gpu_session.sh 1             # there: call 1, and 2 and 3 (benchmarks/session/cases.yaml), 280 s each
#   python -m benchmarks.gpu_results benchmarks/session/NAME.yaml FOLDER   # afterwards, where the results are; NAME.yaml
#                                           # says of the machine what they do not (h200.yaml; OUT/card.txt)
#
# There: Python 3.12, torch 2.11 for CUDA 13 with its triton, numpy, pandas and pyarrow, nvcc, ninja and a C++ compiler.
# torch stays that one; every other library that this project touches comes along in the version it is tested with
# (requirements.lock), so that torch is the only one that a result has to be qualified by.
# Several ranks on one GPU: SESSION_NCCL names the libnccl.so.2 of NCCL 2.30 or later, which takes them.
# Results: $OUT (default output/gpu_session), rows.jsonl and card.txt. SECONDS_OF_CALL: 280, with installing.
set -u
cd "$(dirname "$0")/.."
START=$(date +%s)
PYTHON=${PYTHON:-python3}
WHEELS=.whl
SITE=${SITE:-/tmp/zero-recipes-site}
NAMES="transformers tokenizers huggingface_hub hf-xet httpx2 httpcore2 truststore trl datasets dill multiprocess evaluate \
hjson peft accelerate pydantic pydantic_core annotated-types typing-inspection typing_extensions xxhash safetensors"

wheels() {
    set -e
    mkdir -p $WHEELS
    pins=$(for name in $NAMES; do grep -i "^$name==" requirements.lock; done)
    platforms=$(for n in 28 27 17; do echo --platform manylinux_2_${n}_x86_64; done)
    $PYTHON -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d $WHEELS $pins
    # pure Python: its kernels are compiled where they are first used
    DS_BUILD_OPS=0 $PYTHON -m pip wheel --quiet --no-deps -w $WHEELS "$(grep '^deepspeed==' requirements.lock)"
    header=$(find /usr/include -name libaio.h 2>/dev/null | head -1)
    if [ -n "$header" ]; then # for async_io, where the other machine lacks libaio-dev
        mkdir -p $WHEELS/libaio
        cp "$header" $WHEELS/libaio/
        cp -L "$(find /usr/lib /lib -name 'libaio.so.1' 2>/dev/null | head -1)" $WHEELS/libaio/libaio.so.1
    else
        echo "no libaio.h here: without libaio-dev there, ZeRO-Infinity will be a row that failed"
    fi
    du -sh $WHEELS
}

install() {
    [ -e "$SITE/.ready" ] && return
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" \
        $WHEELS/*.whl && touch "$SITE/.ready"
}

if [ "${1:-}" = wheels ]; then
    wheels
    exit
fi
[ $# -gt 0 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2; }
if [ -d $WHEELS ]; then
    install || exit 1
    export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
fi
if [ -d $WHEELS/libaio ] && ! find /usr/include -name libaio.h 2>/dev/null | grep -q .; then
    cp -r $WHEELS/libaio /tmp/ # a link does not always travel
    ln -sf libaio.so.1 /tmp/libaio/libaio.so
    export CFLAGS="${CFLAGS:-} -I/tmp/libaio" LDFLAGS="${LDFLAGS:-} -L/tmp/libaio"
    export CPATH="/tmp/libaio${CPATH:+:$CPATH}" LIBRARY_PATH="/tmp/libaio${LIBRARY_PATH:+:$LIBRARY_PATH}"
    export LD_LIBRARY_PATH="/tmp/libaio${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
# torch takes the folder above `nvcc` for the toolkit; where that is a link or a wrapper in /usr/local/bin, its headers
# are elsewhere. A toolkit without cusparse.h and the like borrows those that torch's own packages brought.
for folder in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-*; do
    [ -e "$folder/include/cuda_runtime_api.h" ] && [ -x "$folder/bin/nvcc" ] && export CUDA_HOME="$folder" && break
done
if [ -n "${CUDA_HOME:-}" ] && [ ! -e "$CUDA_HOME/include/cusparse.h" ]; then
    borrowed=$($PYTHON -c 'import nvidia; print(*(f"{p}/cu13/include" for p in nvidia.__path__), sep=":")' 2>/dev/null)
    export CPATH="${CPATH:+$CPATH:}$borrowed"
fi
# DeepSpeed links async_io with the driver's library, whose name for linkers not every driver's folder has
if ! echo 'int main(void) { return 0; }' | cc -xc - -lcuda -o /dev/null 2>/dev/null; then
    driver=$(ldconfig -p 2>/dev/null | awk '/libcuda\.so/ { print $NF; exit }')
    for each in "$driver" /usr/local/nvidia/lib64/libcuda.so.1 "${CUDA_HOME:-}"/lib64/stubs/libcuda.so; do
        [ -e "$each" ] && mkdir -p /tmp/libcuda && ln -sf "$each" /tmp/libcuda/libcuda.so &&
            export LIBRARY_PATH="/tmp/libcuda${LIBRARY_PATH:+:$LIBRARY_PATH}" && break
    done
fi
ulimit -l unlimited 2>/dev/null # ZeRO-Infinity locks its buffers
# the machine has no hub to ask, and nobody to report to
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export MAX_JOBS=${MAX_JOBS:-$(nproc)}
mkdir -p "${OUT:-output/gpu_session}"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader >"${OUT:-output/gpu_session}/card.txt"
# a start of the machine took 28 s in November 2026; what is left of the call is the jobs'
left=$((${SECONDS_OF_CALL:-280} - 30 - ($(date +%s) - START)))
$PYTHON benchmarks/gpu_session.py --out "${OUT:-output/gpu_session}" --seconds "$left" --call "$@"
