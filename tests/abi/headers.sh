#!/bin/bash
# headers.sh COMPILER LANGUAGE STANDARD: every public header compiles alone, without a warning, and
# with nothing of ours defined. Skipped (77) where there is no such compiler.
set -euo pipefail
compiler=$1 language=$2 standard=$3
command -v "$compiler" >/dev/null || { echo "no $language compiler: skipped"; exit 77; }

cd lib/include
failed=0
for header in refit.h refit/*.h refit/advanced/*.h; do
    echo "#include <$header>" | "$compiler" -x "$language" -std="$standard" -fsyntax-only -I . \
        -Wall -Wextra -pedantic -Werror - || { echo "$header does not compile alone as $standard"; failed=1; }
done
exit $failed
