#!/usr/bin/env bash
# Builds the Dockerfile and trains in it where no image can be pulled: on a local stand-in for its base image.
#
#   docker/smoke.sh [--torch-wheel FILE] [--tmp DIR] [--fresh] [--one-process]
#
#   --torch-wheel  a CPU wheel of the locked torch for Python 3.11; without it pip downloads torch, with CUDA: gigabytes
#   --tmp          where the stand-in's root is put together: 1.5 GB, fastest in memory (default: TMPDIR, else /tmp)
#   --fresh        make the stand-in and every layer anew
#   --one-process  leave out the run under ZeRO-2 on two processes
#
# Needs root on Debian or Ubuntu, apt-get and PyPI. The stand-in is Debian 12 with its Python 3.11 and torch: what it
# cannot show is CUDA. .ci/run calls this where TORCH_WHEEL is set; tests/unit/test_image.py needs nothing and runs the
# image's scripts. The stand-in and the image stay behind: podman rmi localhost/zero-recipes{,-base}:smoke
set -euo pipefail
cd "$(dirname "$0")/.."
torch_wheel="" tmp=${TMPDIR:-/tmp} fresh="" processes=2
while (($#)); do
    case $1 in
        --torch-wheel) torch_wheel=$2; shift 2 ;;
        --tmp) tmp=$2; shift 2 ;;
        --fresh) fresh=1; shift ;;
        --one-process) processes=1; shift ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
base=localhost/zero-recipes-base:smoke image=localhost/zero-recipes:smoke
work=$(mktemp -d -p "$tmp")
trap 'rm -rf "$work"' EXIT
log() { echo "[${SECONDS} s] $*" >&2; }

need=()
for tool in podman runc mmdebstrap; do command -v "$tool" >/dev/null || need+=("$tool"); done
if ((${#need[@]})); then
    log "installing ${need[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends "${need[@]}" >/dev/null
fi
# runc, because crun refuses hybrid cgroups; the limits, because podman's defaults need CAP_SYS_RESOURCE
cat >"$work/containers.conf" <<CONF
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]
CONF
export CONTAINERS_CONF=$work/containers.conf

make_base() {
    local root=$work/root ca=/etc/ssl/certs/ca-certificates.crt mirror
    mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -1)
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3-pip \
        bookworm "$root" "${mirror:-http://deb.debian.org/debian}"
    # behind a proxy that opens TLS, the host's own authorities are needed in there too
    if [[ -d /usr/local/share/ca-certificates ]]; then
        cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/"
    fi
    chroot "$root" update-ca-certificates >/dev/null 2>&1
    printf '[global]\ncert = %s\n' "$ca" >"$root/etc/pip.conf"
    local torch
    torch=$(grep '^torch==' requirements.lock)
    if [[ -n $torch_wheel ]]; then
        cp "$torch_wheel" "$root/tmp/"
        torch=/tmp/$(basename "$torch_wheel")
    fi
    log "torch into the stand-in: $torch"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" \
        pip install --quiet --break-system-packages --root-user-action=ignore --no-cache-dir "$torch" numpy
    rm -f "$root"/tmp/*.whl
    tar -C "$root" -c . | podman import --quiet \
        -c "ENV SSL_CERT_FILE=$ca REQUESTS_CA_BUNDLE=$ca" -c WORKDIR=/workspace -c CMD=/bin/bash - "$base" >/dev/null
    rm -rf "$root"
}

if [[ -n $fresh ]] || ! podman image exists "$base"; then
    log "making the stand-in"
    make_base
fi
log "stand-in: $(podman image inspect -f '{{.Size}}' "$base") bytes"

log "building, from a checkout with secrets in it"
context=$work/context secret=planted-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
mkdir "$context"
tar -c --exclude=./.venv --exclude=./.venv-canary --exclude=./output --exclude=./build . | tar -x -C "$context"
for path in .env .netrc id_rsa token.txt .ssh/id_ed25519 workspace/cache/huggingface/token recipes/.env recipes/token \
    docker/config.json zero_recipes/.netrc tests/helpers/token; do
    mkdir -p "$context/$(dirname "$path")"
    echo "$secret" >"$context/$path"
done
cache=--layers
if [[ -n $fresh ]]; then cache=--no-cache; fi
podman build --quiet --pull=never --format docker "$cache" --build-arg "BASE_IMAGE=$base" -t "$image" "$context" >/dev/null
rm -rf "$context"
log "image: $(podman image inspect -f '{{.Size}}' "$image") bytes with the stand-in"

log "no secret in any layer"
in_a_layer() { podman save --quiet --format docker-archive "$image" | tar -x -O | grep --count --binary-files=text "$1"; }
in_a_layer "Supervised fine-tuning from one recipe, measured" >/dev/null # the search finds what is there
if in_a_layer "$secret" >/dev/null; then
    log "a layer holds a planted secret"
    exit 1
fi

# an empty volume, as a new pod has it
volume=$work/workspace
mkdir "$volume" "$work/theirs"
chown 4321 "$work/theirs"
inside() { podman run --rm --ipc=host -v "$volume:/workspace" "$image" "$@"; }

log "imports"
inside python -c '
import accelerate, deepspeed, torch, transformers, trl, zero_recipes
from deepspeed.ops.op_builder import AsyncIOBuilder
assert ".venv" not in torch.__path__[0], torch.__path__
assert "/opt/zero-recipes/.venv/" in deepspeed.__file__, deepspeed.__file__
assert AsyncIOBuilder().is_compatible(), "libaio is not found"
print("torch", torch.__version__, "deepspeed", deepspeed.__version__, "trl", trl.__version__)'
inside zero-recipes --help >/dev/null
test "$(inside id -un)" = recipes
test "$(podman run --rm --user 4321:4321 -v "$work/theirs:/workspace" "$image" id -u)" = 4321
inside bash -lc 'test "$HF_HOME" = /workspace/cache/huggingface && command -v zero-recipes accelerate deepspeed pdsh ssh'
inside make --dry-run demo | grep -q demo.sh
if inside make --dry-run demo | grep -q 'pip install'; then
    log "make would install everything again"
    exit 1
fi

log "make test compiles its kernels as recipes, once"
inside bash -ec '
make --no-print-directory --silent ops OPS=deepspeed_shm_comm
make --dry-run test >planned
if grep -E "pip install|engine.kernels" planned; then exit 1; fi
grep pytest planned' >/dev/null

log "tests run as recipes"
inside python -m pytest -q tests/unit/test_image.py >/dev/null

log "a session of ssh has the variables of the pod, and nobody else reads them"
inside ssh-keygen -q -t ed25519 -N "" -f /workspace/key
token="hf_it's \"a\" \$HOME
second line"
pod=$(podman run --detach --rm -e HF_TOKEN="$token" -e RUNPOD_POD_ID=pod -e PUBLIC_KEY="$(cat "$volume/key.pub")" \
    -v "$volume:/workspace" "$image" sleep 600)
by_ssh() {
    podman exec -u recipes "$pod" ssh -i /workspace/key -o StrictHostKeyChecking=no -o LogLevel=ERROR "$@"
}
for attempt in 1 2 3 4 5; do by_ssh localhost true && break; sleep 1; done
test "$(by_ssh localhost printenv HF_TOKEN)" = "$token"
test "$(by_ssh -tt localhost 'bash -lc "printenv RUNPOD_POD_ID"' | tr -d '\r')" = pod
by_ssh localhost zero-recipes --help >/dev/null
podman exec -u nobody "$pod" sh -c '! cat /run/zero-recipes/environment.sh 2>/dev/null'
podman kill "$pod" >/dev/null || true

log "one process"
short=(--max_steps 2 --warmup_steps 0 --eval_strategy no --sample_prompts 0)
inside python run_sft.py recipes/tiny.yaml "${short[@]}" --output_dir /workspace/output/smoke
test -s "$volume/output/smoke/metrics.json"

if ((processes == 2)); then
    log "two processes under ZeRO-2, into a relative output folder"
    inside env OMP_NUM_THREADS=1 accelerate launch --config_file zero2.yaml \
        run_sft.py recipes/tiny.yaml "${short[@]}" --output_dir output/smoke2
    test -s "$volume/output/smoke2/metrics.json"
    kernels=$volume/cache/torch_extensions
    log "compiled on the volume: $(cd "$kernels" && echo */*.so)"
    touch "$kernels/deepspeed_shm_comm/lock"
    inside true
    test ! -e "$kernels/deepspeed_shm_comm/lock"
    test -e "$kernels/deepspeed_shm_comm/deepspeed_shm_comm.so"
    echo "another processor" >"$kernels/compiled_for"
    inside true
    test ! -e "$kernels/deepspeed_shm_comm/deepspeed_shm_comm.so"
fi

log "a pod without a start command stays up, and a pipe still reaches the shell"
pod=$(podman run --detach --rm -v "$volume:/workspace" "$image")
sleep 3
up=$(podman inspect -f '{{.State.Running}}' "$pod" || echo false)
podman kill "$pod" >/dev/null || true
test "$up" = true
test "$(echo pwd | podman run --rm --interactive "$image")" = /opt/zero-recipes
log "done"
