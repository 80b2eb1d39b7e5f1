#!/bin/bash
# The tables of docs/protocol.md have every kind of message, with the keys that lib/wire/message.c and
# lib/wire/manifest.c give it and whether each is required, in their order.
set -euo pipefail

# "KIND KEY yes|no", one a line; KIND as the name of its table begins.
in_code() {
    awk '
        /^static const rft_field [a-z]+_fields\[\] = \{/ { kind = $4; sub(/_fields.*/, "", kind); next }
        /^\};/ { kind = "" }
        kind != "" { entry = entry $0 }
        kind != "" && /\},$/ {
            match(entry, /"[a-z]+"/)
            print kind, substr(entry, RSTART + 1, RLENGTH - 2), entry ~ /\.optional = true/ ? "no" : "yes"
            entry = ""
        }' lib/wire/message.c lib/wire/manifest.c
}

in_document() {
    awk -F '|' '
        /^##+ / { kind = $0; sub(/^#+ /, "", kind); sub(/ .*/, "", kind) }
        /^## Manifests/ { kind = "tensor" }
        kind != "" && /^\| `[a-z]+` \|/ && NF == 6 { gsub(/[ `]/, "", $2); gsub(/ /, "", $4); print kind, $2, $4 }
    ' docs/protocol.md
}

kinds_in_code() {
    sed -n 's/^    X([A-Z]*, "\([a-z]*\)").*/\1/p' lib/wire/message.h
}

kinds_in_document() {
    awk '/^### / { exit } /^\| `[a-z]+` \| [PSb]/ { gsub(/`/, "", $2); print $2 }' docs/protocol.md
}

[ "$(in_code | wc -l)" -gt 60 ]
[ "$(kinds_in_code | wc -l)" -gt 15 ]
diff <(in_code) <(in_document)
diff <(kinds_in_code) <(kinds_in_document)
grep -q "It is protocol $(sed -n 's/^#define RFT_PROTOCOL //p' lib/wire/message.h)\." docs/protocol.md
