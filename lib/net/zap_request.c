/* The frames of a ZAP request: version, id, domain, address, routing id, mechanism, key. */
#include "net/zap_request.h"

#include <string.h>

#define FRAMES 7u

static void take_text(rft_view part, char *text, size_t room)
{
    size_t count = part.count < room ? part.count : 0;
    if (count != 0) memcpy(text, part.data, count);
    text[count] = '\0';
}

void rft_zap_request_take(rft_zap_request *asked, uint32_t at, rft_view part)
{
    char version[4];
    switch (at) {
    case 0:
        take_text(part, version, sizeof version);
        asked->whole = strcmp(version, "1.0") == 0;
        break;
    case 1:
        asked->id_bytes = part.count <= sizeof asked->id ? part.count : 0;
        if (asked->id_bytes != 0) memcpy(asked->id, part.data, asked->id_bytes);
        break;
    case 2: take_text(part, asked->domain, sizeof asked->domain); break;
    case 3: take_text(part, asked->address, sizeof asked->address); break;
    case 5: take_text(part, asked->mechanism, sizeof asked->mechanism); break;
    case 6:
        asked->whole = asked->whole && part.count == RFT_KEY_BYTES;
        if (asked->whole) memcpy(asked->key.bytes, part.data, RFT_KEY_BYTES);
        break;
    default: break;
    }
}

void rft_zap_request_end(rft_zap_request *asked, uint32_t count)
{
    asked->whole = asked->whole && count == FRAMES && strcmp(asked->mechanism, "CURVE") == 0;
}
