# pytest.awk: what `pytest -v` printed, after stamps (stamp.sh), to one JSON object a test, as
# tests.awk makes of cmocka's words, by itself or with pytest-xdist (-n). Needs -v on=DEVICE
# -v status=EXIT_STATUS.

function row(name, result, seconds) {
    suite = name
    if (name ~ /::/) { sub(/::.*/, "", suite); sub(/[^:]*::/, "", name) }
    sub(/.*\//, "", suite)
    sub(/\.py$/, "", suite)
    gsub(/[\\"]/, "", name)
    printf "{\"suite\":\"%s\",\"on\":\"%s\",\"test\":\"%s\",\"status\":\"%s\",\"seconds\":%.3f}\n", \
        suite, on, name, result, seconds
    rows++
    if (result == "fail") failures++
}

BEGIN {
    word["PASSED"] = word["XFAIL"] = "pass"
    word["FAILED"] = word["ERROR"] = "fail"
    word["SKIPPED"] = "skip"
}

# 12.345678 test_x.py::test_name[a b] PASSED [ 12%]
match($0, / (PASSED|FAILED|ERROR|SKIPPED|XFAIL)( \(.*\))? +\[ *[0-9]+%\]$/) {
    now = $1
    split(substr($0, RSTART + 1), said, " ")
    name = substr($0, length($1) + 2, RSTART - length($1) - 2)
    row(name, word[said[1]], now - before)
}
{ before = $1 }

# 12.345678 test_x.py::test_name[a b] , as pytest-xdist says that one begins
/^[0-9.]+ [^ ]+\.py::.* $/ {
    name = substr($0, length($1) + 2)
    sub(/ +$/, "", name)
    if (!(name in begun)) begun[name] = $1
}

# 12.345678 [gw0] [ 12%] PASSED test_x.py::test_name[a b]
match($0, /^[0-9.]+ \[gw[0-9]+\] +\[ *[0-9]+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) /) {
    split(substr($0, index($0, "%]") + 3), said, " ")
    name = substr($0, RLENGTH + 1)
    sub(/ +$/, "", name)
    row(name, word[said[1]], name in begun ? $1 - begun[name] : 0)
    delete begun[name]
}

END {
    if (status != 0)
        for (name in begun) row(name " (did not end)", "fail", before - begun[name])
    if (rows == 0) row("python::(pytest)", "fail", before)
    else if (status != 0 && failures == 0) row("python::(pytest: status " status ")", "fail", before)
}
