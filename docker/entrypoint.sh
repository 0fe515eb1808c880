#!/bin/sh
# Prepares the volume at /workspace, which may be empty or come from another machine, then becomes the command.
set -eu
mkdir -p "$HF_HOME" "$TORCH_EXTENSIONS_DIR" /workspace/output

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
