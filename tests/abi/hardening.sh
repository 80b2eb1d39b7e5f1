#!/bin/bash
# hardening.sh CHECKED FILE…: lists the hardening that each library or program lacks: a stack protector,
# read-only relocations, a stack that is not executable, no fixed address; with CHECKED 1 calls of libc
# that check the size of their destination.
set -uo pipefail
export LC_ALL=C
command -v readelf >/dev/null || exit 77
checked=$1
shift
failed=0

# lacks FILE WORD…
lacks() {
    echo "$1 lacks $2"
    failed=1
}

# guarded FILE: whether its x86-64 code reads the stack protector's secret, which glibc keeps at %fs:0x28.
guarded() {
    grep -q '%fs:0x28' <<<"$(objdump -d --no-show-raw-insn "$1" 2>/dev/null)"
}

for file in "$@"; do
    headers=$(readelf -W --file-header --program-headers "$file") || exit 1
    dynamic=$(readelf -W --dynamic "$file") || exit 1
    symbols=$(readelf -W --dyn-syms "$file") || exit 1
    grep -q ' Type: *DYN ' <<<"$headers" || lacks "$file" "addresses that are chosen when it is loaded (PIE)"
    grep -q 'GNU_RELRO' <<<"$headers" || lacks "$file" "read-only relocations (-z relro)"
    grep -qE '\((BIND_NOW|FLAGS_1)\).*(BIND_NOW|NOW)|\(FLAGS\).*BIND_NOW' <<<"$dynamic" ||
        lacks "$file" "relocations that are all done when it is loaded (-z now)"
    grep -qE 'GNU_STACK .* RW +0(x[0-9a-f]+)?$' <<<"$headers" || lacks "$file" "a stack that cannot be run (-z noexecstack)"
    ! grep -q '(TEXTREL)' <<<"$dynamic" || lacks "$file" "code that is never written to (it has TEXTREL)"
    # A bundle has the function that ends the process inside: there the comparison before it is looked for.
    grep -q ' __stack_chk_fail' <<<"$symbols" || guarded "$file" ||
        lacks "$file" "a stack protector (-fstack-protector-strong)"
    [ "$checked" -eq 0 ] || grep -qE ' __[a-z]+_chk' <<<"$(grep -v __stack_chk <<<"$symbols")" ||
        lacks "$file" "checked calls of libc (_FORTIFY_SOURCE)"
done
exit $failed
