#!/bin/bash
# refit publish checks every file before it publishes one, and says what is wrong with a bad file.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# refuses_raw PART LENGTH HEADER DATA: a file of these parts is status 5, with PART in the sentence.
refuses_raw() {
    safetensors raw "$2" "$3" "$4" "$scratch/bad"
    refuses 5 "$1" publish "$scratch/bad" --bind "ipc://$scratch/socket"
}

# tensor DTYPE SHAPE BEGIN END: one entry's value.
tensor() {
    printf '{"dtype":"%s","shape":%s,"data_offsets":[%s,%s]}' "$@"
}

# refuses_tensor PART DATA DTYPE SHAPE BEGIN END: as refuses_raw, for a file with one tensor.
refuses_tensor() {
    refuses_raw "$1" - "{\"a\":$(tensor "$3" "$4" "$5" "$6")}" "$2"
}

refuses_raw "at most 100000000 are taken" 1152921504606846976 '{}' 0
refuses_raw "at most 100000000 are taken" 18446744073709551615 '{}' 0
refuses_raw "is it a safetensors file? its header says it has 100000001 bytes" 100000001 '{}' 0
refuses_raw "but only 2 follow" 100000000 '{}' 0
refuses_raw "but only 2 follow" 3 '{}' 0
refuses_raw "is not a JSON object" 0 '' 8
refuses_raw "is not a JSON object: it is an array" - '[]' 0
refuses_raw "is not a JSON object: it is an array" - '[{}]' 0
refuses_raw "is not a JSON object" - '{"a":' 0
refuses_raw "is not a JSON object" - '{} x' 0
refuses_raw "is not a JSON object" - "$(printf '{"\377":1}')" 0
refuses_raw "is not a JSON object" - "{\"a\":$(printf '[%.0s' {1..5000})" 0
refuses_raw "is not a JSON object: duplicate" - "{\"a\":$(tensor U8 '[1]' 0 1),\"a\":$(tensor U8 '[1]' 1 2)}" 2
refuses_raw "is not a JSON object: duplicate" - '{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 1
refuses_raw "is not a JSON object: too big" - '{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}' 1

refuses_tensor "ends at 16, but the file has only 15" 15 U8 '[16]' 0 16
refuses_tensor "the tensors end at 16, but the file has 17" 17 U8 '[16]' 0 16
refuses_tensor "begins at 8, but the one before it ends at 0" 24 U8 '[16]' 8 24
refuses_tensor "ends at 1152921504606846976, but" 16 U8 '[1152921504606846976]' 0 1152921504606846976
refuses_tensor "has 12 bytes by its shape, but 16 by its offsets" 16 F32 '[3]' 0 16
refuses_tensor "has 0 bytes by its shape" 16 F32 '[4,0]' 0 16
refuses_tensor "the smaller first" 16 U8 '[16]' 16 0
refuses_tensor "the smaller first" 16 U8 '[16]' -16 0
refuses_tensor "the smaller first" 16 U8 '[16]' 0.0 16.0
refuses_tensor "dimension 1 is not a whole number" 16 U8 '[4,-4]' 0 16
refuses_tensor "dimension 0 is not a whole number" 16 U8 '[16.0]' 0 16
refuses_tensor "dimension 0 is not a whole number" 16 U8 '["16"]' 0 16
refuses_tensor "has no shape" 16 U8 '16' 0 16
refuses_tensor "more elements than can be counted" 16 U8 '[4294967296,4294967296]' 0 16
refuses_tensor "more elements than can be counted" 0 U8 '[4294967296,4294967296,4]' 0 0
refuses_tensor "does not end at a whole byte" 2 F4 '[3]' 0 2
refuses_tensor "has dtype F31" 16 F31 '[4]' 0 16
refuses_tensor "has 9 dimensions: refit carries at most 8" 1 U8 '[1,1,1,1,1,1,1,1,1]' 0 1

refuses_raw "begins at 4, but the one before it ends at 8" - \
    "{\"a\":$(tensor U8 '[8]' 0 8),\"b\":$(tensor U8 '[8]' 4 12)}" 12
refuses_raw "begins at 9, but the one before it ends at 8" - \
    "{\"b\":$(tensor U8 '[8]' 9 17),\"a\":$(tensor U8 '[8]' 0 8)}" 17
refuses_raw "has no dtype" - '{"a":{"shape":[1],"data_offsets":[0,1]}}' 1
refuses_raw "has a dtype that is not a text" - '{"a":{"dtype":5,"shape":[1],"data_offsets":[0,1]}}' 1
refuses_raw "is not a JSON object with dtype, shape and data_offsets" - '{"a":7}' 0
long=$(printf '\345\261\202%.0s' {1..150})
refuses_raw "is not a JSON object with dtype, shape and data_offsets" - "{\"$long\":7}" 0
iconv -f UTF-8 -t UTF-8 "$scratch/err" >"$scratch/same" || complain "a name was cut inside a character"
refuses_raw "the smaller first" - '{"a":{"dtype":"U8","shape":[1]}}' 1
refuses_raw "says more than" - '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"scale":2}}' 1
refuses_raw "__metadata__ must map texts to texts" - '{"__metadata__":{"format":1}}' 0
refuses_raw "__metadata__ must map texts to texts" - '{"__metadata__":"pt"}' 0
refuses_raw "tensor a?b" - "{\"a\\nb\":$(tensor U8 '[2]' 0 1)}" 1

# Files that safetensors allows and that no version can be.
refuses_raw "$scratch/bad: it has no tensor" - '{}' 0
refuses_raw "$scratch/bad: it has no tensor" - '{"__metadata__":{"format":"pt"}}' 0
refuses_raw "$scratch/bad: a tensor has an empty name" - "{\"\":$(tensor U8 '[1]' 0 1)}" 1
safetensors named 0 1000000 "$scratch/named"
refuses 5 "$scratch/named: the name of tensor 00000000000000000000000000000000... has 1000000 bytes: limits.name_bytes allows 512" \
    publish "$scratch/named" --bind "ipc://$scratch/socket"
safetensors many 0 120000 "$scratch/many"
refuses 5 "$scratch/many: it has 120000 tensors: limits.tensors allows 100000" \
    publish "$scratch/many" --bind "ipc://$scratch/socket"
refuses 5 "$scratch/bad: " inspect "$scratch/bad"

safetensors all 1 "$scratch/good"
for bytes in 1 7 8 100 4000; do
    head -c "$bytes" "$scratch/good" >"$scratch/cut"
    run 5 publish "$scratch/good" "$scratch/cut" --bind "ipc://$scratch/socket"
done
: >"$scratch/cut"
refuses 5 "it is empty or not a regular file" publish "$scratch/cut"
refuses 5 "it is empty or not a regular file" publish "$scratch"
mkfifo "$scratch/pipe"
refuses 5 "it is empty or not a regular file" publish "$scratch/pipe"
refuses 6 "cannot open it: No such file" publish "$scratch/good" "$scratch/missing"
refuses 2 "which file?" publish
refuses 2 "--workers cannot be 0" publish "$scratch/good" --workers 0
refuses 2 "--timeout cannot be 1e3" publish "$scratch/good" --timeout 1e3
refuses 2 "--timeout cannot be 99999999999999999999" publish "$scratch/good" --timeout 99999999999999999999
[ ! -e "$scratch/socket" ] || complain "a bad file was found only after the endpoint was bound"

# A limit that was raised lets it in; one that only the whole manifest shows is the file's, too.
run 4 publish "$scratch/many" --bind "ipc://$scratch/socket" --timeout 1 --set limits.tensors=120000
run 5 publish "$scratch/many" --bind "ipc://$scratch/socket" --set limits.tensors=120000 \
    --set limits.manifest_bytes=64KiB
grep -qF "$scratch/many: a message would be larger" "$scratch/err" || complain "said: $(cat "$scratch/err")"
finish
