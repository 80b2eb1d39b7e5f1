/* welcome: what WELCOME of any publisher must say. */
#ifndef RFT_WELCOME_H
#define RFT_WELCOME_H

#include "wire/message.h"

/* REFIT_ERR_PROTOCOL: a worker cannot follow it. The protocol's number is not looked at. */
refit_status rft_welcome_check(const rft_message *welcome, refit_error *error);

#endif
