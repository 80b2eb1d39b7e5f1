/*
 * The compiled kernels as bytes of the library: the assembler includes the two files that
 * make_image.sh wrote, so that no compiler reads them as numbers. RFT_KERNELS_FOLDER is this folder
 * (CMakeLists.txt).
 */
#include "kernels/cuda_image.h"

/* Aligned to 16 bytes, because the driver reads machine code in words; a NUL follows, which ends
 * the text. */
#define INCLUDE_BYTES(symbol, file)                                                                \
    __asm__(".pushsection .rodata\n"                                                               \
            ".balign 16\n"                                                                         \
            ".globl " #symbol "\n"                                                                 \
            ".hidden " #symbol "\n"                                                                \
            ".type " #symbol ", %object\n" #symbol ":\n"                                           \
            ".incbin \"" RFT_KERNELS_FOLDER "/" file "\"\n"                                        \
            ".byte 0\n"                                                                            \
            ".size " #symbol ", . - " #symbol "\n"                                                 \
            ".popsection\n")

INCLUDE_BYTES(rft_cuda_image, "cuda_image.fatbin");
INCLUDE_BYTES(rft_cuda_ptx, "cuda_image.ptx");
