#!/bin/bash
# lib/README.md, the floor plan, names every source file of lib/ and kernels/, and none that is gone.
set -euo pipefail
plan=lib/README.md
failed=0
for file in lib/*/*.c kernels/*.c; do
    name=${file##*/}
    grep -q "\`$name\`" "$plan" || { echo "$plan does not say what $file is for"; failed=1; }
done
for name in $(grep -oE "\`[a-z0-9_]+\.c\`" "$plan" | tr -d "\`" | sort -u); do
    compgen -G "lib/*/$name" >/dev/null || compgen -G "kernels/$name" >/dev/null ||
        { echo "$plan names $name, which is not there"; failed=1; }
done
exit $failed
