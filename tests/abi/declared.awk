# Prints the names of the functions that headers declare as REFIT_API, one a line.
/^#/ { next }
/REFIT_API/ { declaration = ""; reading = 1 }
reading {
    declaration = declaration " " $0
    if (match(declaration, /refit_[a-z0-9_]+\(/)) {
        print substr(declaration, RSTART, RLENGTH - 1)
        reading = 0
    }
}
