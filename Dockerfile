# zero-recipes on a rented GPU pod, or on any machine with NVIDIA's container toolkit:
#
#   docker build -t zero-recipes .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/workspace:/workspace" zero-recipes
#   zero-recipes train pythia.yaml --config_file zero3.yaml
#   zero-recipes sweep recipes/pythia.yaml --strategies ddp,zero0,zero1,zero2,zero3 --num_processes 2
#
# --ipc=host: NCCL and the data loaders share memory between processes. memlock: NVMe offload pins its buffers.
# On RunPod: docs/launch.md.
#
# The command runs as the user `recipes` (uid 1000); only the entrypoint is root, for volumes belong to root on pods.
# With `--user` it runs as that user, who must be able to write to /workspace. In a second shell: docker exec -u recipes.
# Tokens come at run time (-e HF_TOKEN, or `hf auth login` into the volume), never by COPY, ARG or ENV.

# A devel image: DeepSpeed compiles its kernels on first use and needs nvcc. The tag must carry the torch of
# requirements.lock; the build stops if it does not. CUDA 13 needs driver 580 or later; for an older driver take
# --build-arg BASE_IMAGE=pytorch/pytorch:2.13.0-cuda12.6-cudnn9-devel. Neither tag was pulled when this was written:
# the file is tested by docker/smoke.sh on a CPU stand-in.
ARG BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE_IMAGE}

# libaio-dev: NVMe offload; openssh-client and pdsh: the deepspeed launcher on several machines; ninja comes from pip
# openssh-server: a pod with PUBLIC_KEY. The host keys that its package makes would be the same in every pod.
# libibverbs1, ibverbs-providers: NCCL over InfiniBand or RoCE, with the flags of docs/launch.md
# g++ brings gcc and python3-dev Python.h: Triton compiles with them in every run on GPUs
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git ibverbs-providers libaio-dev libibverbs1 make openssh-client openssh-server pdsh python3-dev \
        python3-venv \
    && rm -f /etc/ssh/ssh_host_* \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/zero-recipes

# The lock before the sources: a changed recipe does not install everything anew.
# INSTALL_TORCH=1 lets pip download torch where the base has none, or another version (gigabytes).
ARG INSTALL_TORCH=
COPY requirements.txt requirements.lock ./
COPY scripts/check_machine.sh scripts/
COPY docker/install_lock.sh docker/
RUN INSTALL_TORCH="$INSTALL_TORCH" sh docker/install_lock.sh

# What is worth keeping lies under /workspace, where the pod's volume is: models and data, compiled kernels, results.
ENV PATH=/opt/zero-recipes/.venv/bin:$PATH \
    HF_HOME=/workspace/cache/huggingface \
    TORCH_EXTENSIONS_DIR=/workspace/cache/torch_extensions \
    TRITON_CACHE_DIR=/workspace/cache/triton

# .ready: the Makefile's mark of a finished .venv, so that `make demo` and `make test` work here without installing.
# output: relative paths like output/zero3 outlive the container.
# the folder belongs to recipes, what is in it to root: no run changes the program. .venv/kernels belongs to recipes,
# too: `make test` compiles the tests' kernels there, and leaves its marks.
# ubuntu: images of Ubuntu 24.04 have a user of this name with uid 1000
# bash: sshd starts the user's shell, and dash reads nothing for `ssh HOST COMMAND`
# profile.sh: a login shell (web terminal, ssh) starts from /etc/profile, which forgets the variables of image and pod.
COPY . .
RUN pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps -e . \
    && touch .venv/.ready \
    && python -m compileall -q zero_recipes run_sft.py \
    && if id -u ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --shell /bin/bash --uid 1000 recipes \
    && mkdir .venv/kernels \
    && chown recipes: . .venv/kernels \
    && mkdir -p /workspace/output \
    && ln -s /workspace/output output \
    && python docker/session_environment.py PATH LIBRARY_PATH LD_LIBRARY_PATH HF_HOME TORCH_EXTENSIONS_DIR \
        TRITON_CACHE_DIR >docker/image.sh \
    && cp docker/profile.sh /etc/profile.d/zero-recipes.sh

ENTRYPOINT ["sh", "/opt/zero-recipes/docker/entrypoint.sh"]
CMD ["bash"]
