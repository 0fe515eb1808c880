#!/bin/sh
# Prepares the volume at /workspace, which may be empty or come from another machine, then becomes the command.
set -eu

# Root only prepares what is ours on the volume; the rest of this script, and the command, run as `recipes`.
ours="/workspace/cache /workspace/output"
session=/run/zero-recipes/environment.sh
as_recipes="setpriv --reuid=recipes --regid=recipes --init-groups"

# What the pod was started with, tokens too, for sessions (profile.sh): `recipes` alone may read it, and it lies in the
# container, not on the volume. It stays root's, whose login shells read it, too.
keep_for_sessions() {
    (umask 022 && mkdir -p "${session%/*}") &&
        (umask 077 && python -I /opt/zero-recipes/docker/session_environment.py >"$session.new") &&
        chown root:recipes "$session.new" &&
        chmod 440 "$session.new" &&
        mv "$session.new" "$session"
}

if [ "$(id -u)" = 0 ]; then
    # A network volume may forbid what root does elsewhere: what `recipes` cannot write to is refused below.
    $as_recipes mkdir -p $ours 2>/dev/null || mkdir -p $ours || true
    # not through links: one on the volume may lead anywhere
    find $ours -xdev -not -user recipes -not -type l -exec chown --no-dereference recipes: {} + 2>/dev/null ||
        echo "the volume stays as it is: it could not be prepared for user recipes" >&2
    keep_for_sessions || echo "the pod's variables do not reach sessions of ssh: $session cannot be written" >&2
    if [ -n "${PUBLIC_KEY:-}" ]; then # a pod's way in: ssh recipes@HOST, by this key alone
        (umask 077 && mkdir -p /run/sshd /home/recipes/.ssh && echo "$PUBLIC_KEY" >/home/recipes/.ssh/authorized_keys)
        chown -R recipes: /home/recipes/.ssh
        ssh-keygen -A >/dev/null
        # bash of `ssh HOST COMMAND` reads this file; that of `ssh HOST` has it from /etc/profile
        "$(PATH=$PATH:/usr/sbin && command -v sshd)" -o PasswordAuthentication=no -o PermitRootLogin=no \
            -o SetEnv=BASH_ENV=/etc/profile.d/zero-recipes.sh
    fi
    export HOME=/home/recipes USER=recipes LOGNAME=recipes
    exec $as_recipes sh "$0" "$@"
fi
for folder in "$HF_HOME" "$TORCH_EXTENSIONS_DIR" "$TRITON_CACHE_DIR" /workspace/output; do
    if ! mkdir -p "$folder" 2>/dev/null || [ ! -w "$folder" ]; then
        echo "refused: $folder cannot be written to by user $(id -u)" >&2
        echo "    why: models, compiled kernels and results are kept under /workspace." >&2
        echo "   fix:  start without --user, so that the entrypoint prepares the volume. If the volume forbids chown, let" >&2
        echo "         user $(id -u) write to the folder where the volume comes from, or mount another at /workspace." >&2
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
