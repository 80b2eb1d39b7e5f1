# Prints the example that the door's comment shows, without the comment's margin.
/The smallest whole use/ { showing = 1; next }
/Rules that hold everywhere/ { showing = 0 }
showing && /^ \*     / { print substr($0, 8) }
