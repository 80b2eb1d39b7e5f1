/* refit_keys_generate: a pair from ZeroMQ, in files of trust/. */
#include <refit/keys.h>

#include "net/curve.h"
#include "trust/key_file.h"
#include "trust/secret.h"

refit_status refit_keys_generate(const char *folder, const char *name, int replace,
                                 refit_error *error)
{
    rft_key public_key;
    void *secret_key = NULL;
    RFT_REFUSE_IF(folder == NULL || name == NULL || folder[0] == '\0', error, REFIT_ERR_INVALID,
                  "keys need a folder and a name");
    RFT_TRY(rft_secret_open(sizeof(rft_key), &secret_key, error));
    refit_status status = rft_curve_make_pair(&public_key, secret_key, error);
    if (status == REFIT_OK)
        status = rft_key_files_write(folder, name, &public_key, secret_key, replace != 0, error);
    rft_secret_close(secret_key, sizeof(rft_key));
    return status;
}
