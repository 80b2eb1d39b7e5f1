# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
# The tests of the adapter run with Ray wherever it is installed; here with a pinned version.
versions="2.60.0"
megabytes=5300
minutes="3 5"
tests="python/test_ray.py python/test_ray_nodes.py"

install() {
    "$pip" -q install torch==2.13.0 "ray[default]==$1" numpy
}
