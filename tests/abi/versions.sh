#!/bin/bash
# The sources name one version, and CHANGELOG.md has a section for it.
set -euo pipefail
header=lib/include/refit/version.h
cmake=$(sed -n 's/^project(refit VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
text=$(sed -n 's/^#define REFIT_VERSION_STRING "\(.*\)"/\1/p' "$header")
numbers=$(sed -n 's/^#define REFIT_VERSION_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\)$/\2/p' "$header" | paste -sd.)
python=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' bindings/python/src/refit/_version.py)
for version in "$text" "$numbers" "$python"; do
    if [ "$version" != "$cmake" ]; then
        echo "CMakeLists.txt has $cmake, and the others $text, $numbers (version.h), $python (_version.py)" >&2
        exit 1
    fi
done
grep -q "^## \[${cmake//./\\.}\]" CHANGELOG.md || {
    echo "CHANGELOG.md has no section \"## [$cmake]\"" >&2
    exit 1
}
