/* Text in lines of a given width, for help that comes from the option table. */
#include "wrap.h"

#include <string.h>

void cli_wrap(FILE *out, const char *prefix, const char *text, size_t columns)
{
    size_t used = 0;
    while (*text != '\0') {
        const size_t word = strcspn(text, " ");
        if (used > 0 && used + 1 + word > columns) {
            (void)fputc('\n', out);
            used = 0;
        }
        used += (size_t)fprintf(out, "%s%.*s", used == 0 ? prefix : " ", (int)word, text);
        text += word;
        text += strspn(text, " ");
    }
    (void)fputc('\n', out);
}
