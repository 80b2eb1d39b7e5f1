#!/bin/sh
# pack.sh FOLDER ARCHIVE: packs the inputs in FOLDER; the same inputs always make the same archive.
set -eu
export LC_ALL=C # the order of *
case $2 in /*) archive=$2 ;; *) archive=$PWD/$2 ;; esac
cd "$1"
tar --format=ustar --blocking-factor=1 --mode=0644 --mtime=@0 --owner=0 --group=0 --numeric-owner \
    -cf "$archive" -- *
