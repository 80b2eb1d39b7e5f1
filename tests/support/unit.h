/* What a test includes: cmocka and shorthands. */
#ifndef UNIT_H
#define UNIT_H

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/test.h"

#endif
