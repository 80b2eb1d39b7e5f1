#!/bin/bash
# How much the tests notice: changes one place of the library at a time, and says which changes no
# test has noticed. tests/README.md says how to read that; mutate.py does it.
#
#   tests/mutate.sh [--seed N] [--count 100] [--jobs J] [--list] [FOLDER…]
exec python3 "$(dirname "${BASH_SOURCE[0]}")/mutate.py" "$@"
