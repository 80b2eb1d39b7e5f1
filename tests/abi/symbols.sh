#!/bin/bash
# symbols.sh LIBRARY [--write]: librefit.so exports the symbols that the headers declare, and those
# of symbols.txt, which is kept to compare with the version before. With --write, rewrites symbols.txt.
set -euo pipefail
export LC_ALL=C
here=$(dirname "${BASH_SOURCE[0]}")
library=$1
list=$here/symbols.txt

exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort)
declared=$(awk -f "$here/declared.awk" "$here"/../../lib/include/refit.h \
    "$here"/../../lib/include/refit/{,advanced/}*.h | sort)

if [ "${2:-}" = --write ]; then
    printf '%s\n' "$exported" >"$list"
fi

failed=0
include=$here/../../lib/include
while read -r old new; do
    grep -qrw --include='*.h' --exclude=deprecated.h -- "$new" "$include" || {
        echo "refit/deprecated.h: $old stands for $new, which no header has"
        failed=1
    }
done < <(awk '$1 == "#define" && NF == 3 { print $2, $3 }' "$include/refit/deprecated.h")
diff -u --label declared --label exported <(echo "$declared") <(echo "$exported") || {
    echo "librefit.so does not export exactly what its headers declare (- missing, + undeclared)"
    failed=1
}
diff -u "$list" <(echo "$exported") || {
    echo "the exported symbols changed: if that is meant, run tests/abi/symbols.sh $library --write"
    failed=1
}
exit $failed
