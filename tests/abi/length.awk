# Counts the lines of functions, from the opening brace to the closing one, which clang-format puts
# into the first column. Lists those above 40 lines; fails if one is above 80.
FNR == 1 { inside = 0 }
/^[A-Za-z].*\(/ {
    name = $0
    sub(/\(.*/, "", name)
    sub(/.*[ *]/, "", name)
}
/^{$/ {
    inside = 1
    from = FNR
}
/^}/ && inside {
    inside = 0
    lines = FNR - from - 1
    if (lines > 40) printf "%s:%d: %s has %d lines\n", FILENAME, from, name, lines
    if (lines > 80) failed = 1
}
END {
    if (failed) print "a function has more than 80 lines: split it by meaning"
    exit failed
}
