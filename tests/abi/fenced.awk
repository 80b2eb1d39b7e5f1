# Prints the C blocks of a Markdown file, as one source.
/^```c$/ { inside = 1; next }
/^```/ { inside = 0 }
inside
