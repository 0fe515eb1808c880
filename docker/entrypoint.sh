#!/bin/sh
# Prepares the volume at /workspace, which may be empty or come from another machine, then becomes the command.
set -eu

# Root only prepares what is ours on the volume; the rest of this script, and the command, run as `recipes`.
ours="/workspace/cache /workspace/output"
if [ "$(id -u)" = 0 ]; then
    mkdir -p $ours
    # not through links: one on the volume may lead anywhere
    find $ours -xdev -not -user recipes -not -type l -exec chown --no-dereference recipes: {} +
    if [ -n "${PUBLIC_KEY:-}" ]; then # a pod's way in: ssh recipes@HOST, by this key alone
        (umask 077 && mkdir -p /run/sshd /home/recipes/.ssh && echo "$PUBLIC_KEY" >/home/recipes/.ssh/authorized_keys)
        chown -R recipes: /home/recipes/.ssh
        ssh-keygen -A >/dev/null
        /usr/sbin/sshd -o PasswordAuthentication=no -o PermitRootLogin=no
    fi
    export HOME=/home/recipes USER=recipes LOGNAME=recipes
    exec setpriv --reuid=recipes --regid=recipes --init-groups sh "$0" "$@"
fi
for folder in "$HF_HOME" "$TORCH_EXTENSIONS_DIR" "$TRITON_CACHE_DIR" /workspace/output; do
    if ! mkdir -p "$folder" 2>/dev/null || [ ! -w "$folder" ]; then
        echo "refused: $folder cannot be written to by user $(id -u)" >&2
        echo "    why: models, compiled kernels and results are kept under /workspace." >&2
        echo "   fix:  start without --user, so that the entrypoint prepares the volume; or chown $(id -u) the folder." >&2
        exit 2
    fi
done
[ -w "${HOME:-/}" ] || export HOME=/workspace/cache # --user with a number that no account has

# A compiler that died with the last pod leaves a lock, for which torch would wait for ever.
rm -f "$TORCH_EXTENSIONS_DIR"/*/lock

# DeepSpeed compiles for the processor at hand (-march=native), and torch notices neither another processor nor another
# version of itself in this folder: what was compiled elsewhere is compiled anew, else it may crash.
here="$(lscpu | grep '^Flags') $(python -VV) $(python -c 'from importlib.metadata import version as v
print(v("torch"), v("deepspeed"))')"
if [ "$here" != "$(cat "$TORCH_EXTENSIONS_DIR/compiled_for" 2>/dev/null)" ]; then
    rm -f "$TORCH_EXTENSIONS_DIR"/*/*.o "$TORCH_EXTENSIONS_DIR"/*/*.so
    echo "$here" >"$TORCH_EXTENSIONS_DIR/compiled_for"
fi

# A pod without a start command has no terminal: a shell would end at once, and the pod with it.
if [ "$*" = bash ] && [ "$(readlink /proc/self/fd/0)" = /dev/null ]; then
    exec sleep infinity
fi
exec "$@"
